// softdelta._native: the library as a custom call of XLA, for jax.ffi. Compiled where XLA's header is found.
#include <xla/ffi/api/ffi.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "python/native/call.h"
#include "python/native/operands.h"

namespace softdelta::python {

namespace ffi = xla::ffi;

namespace {

DLDataType type_of(ffi::DataType type) {
    switch (type) {
        case ffi::DataType::F64:
            return {kDLFloat, 64, 1};
        case ffi::DataType::F32:
            return {kDLFloat, 32, 1};
        case ffi::DataType::F16:
            return {kDLFloat, 16, 1};
        case ffi::DataType::BF16:
            return {kDLBfloat, 16, 1};
        case ffi::DataType::S64:
            return {kDLInt, 64, 1};
        case ffi::DataType::S32:
            return {kDLInt, 32, 1};
        case ffi::DataType::PRED:
            return {6, 8, 1};  // kDLBool, which older headers of DLPack lack
        default:
            throw std::invalid_argument("an operand has a type that softdelta does not read");
    }
}

// Views of XLA's buffers, which are compact, by the names of operands and results.
class Buffers {
  public:
    void add(std::string_view name, const ffi::AnyBuffer& buffer) {
        View& view = views_[std::string(name)];
        const auto dims = buffer.dimensions();
        view.shape.assign(dims.begin(), dims.end());
        view.tensor.data = buffer.untyped_data();
        view.tensor.device = {kDLCPU, 0};
        view.tensor.ndim = static_cast<std::int32_t>(dims.size());
        view.tensor.dtype = type_of(buffer.element_type());
        view.tensor.shape = view.shape.data();
    }

    template <class Struct>
    CStruct<Struct> tensors() {
        CStruct<Struct> c{};
        c.size = sizeof c;
        for (const auto& field : fields_of<Struct>)
            if (const auto at = views_.find(field.name); at != views_.end()) field.set(c, &at->second.tensor);
        return c;
    }

  private:
    struct View {
        DLTensor tensor{};
        std::vector<std::int64_t> shape;
    };
    std::map<std::string, View> views_;
};

// Options as numbers, in their order.
struct Numbers {
    ffi::Span<const double> values;
    std::size_t at = 0;

    template <class T>
    T next() {
        return static_cast<T>(values[at++]);
    }
};

std::string_view next_name(std::string_view& names) {
    const std::size_t end = names.find(' ');
    const std::string_view name = names.substr(0, end);
    names.remove_prefix(end == std::string_view::npos ? names.size() : end + 1);
    return name;
}

softdelta_status run_function(std::string_view function, Buffers& buffers, Numbers numbers,
                              const softdelta_execution& execution) {
    if (function.starts_with("attention")) {
        const auto in = buffers.tensors<AttentionInputs>();
        const auto options = attention_options_of(numbers);
        if (function == "attention_forward") {
            const auto out = buffers.tensors<AttentionOutputs>();
            return softdelta_attention_forward(&in, &out, &options, &execution);
        }
        const auto gradients = buffers.tensors<AttentionGradients>();
        return softdelta_attention_backward(&in, &gradients, &options, &execution);
    }
    const auto in = buffers.tensors<DeltaInputs>();
    const auto options = delta_options_of(numbers);
    if (function == "delta_forward") {
        const auto out = buffers.tensors<DeltaOutputs>();
        return softdelta_delta_forward(&in, &out, &options, &execution);
    }
    const auto gradients = buffers.tensors<DeltaGradients>();
    return softdelta_delta_backward(&in, &gradients, &options, &execution);
}

// operands, results: names with spaces between them. softdelta/jax.py calls this with what it has checked.
ffi::Error call(ffi::RemainingArgs arguments, ffi::RemainingRets written, std::string_view function,
                std::string_view operands, std::string_view results, ffi::Span<const double> options,
                std::int64_t threads) {
    try {
        Buffers buffers;
        for (std::size_t i = 0; i < arguments.size(); ++i)
            buffers.add(next_name(operands), *arguments.get<ffi::AnyBuffer>(i));
        for (std::size_t i = 0; i < written.size(); ++i)
            buffers.add(next_name(results), **written.get<ffi::AnyBuffer>(i));
        softdelta_execution execution = softdelta_execution_default();
        execution.threads = static_cast<int>(threads);
        if (run_function(function, buffers, {options}, execution) == SOFTDELTA_OK) return ffi::Error::Success();
        return ffi::Error::InvalidArgument(softdelta_last_error());
    } catch (const std::exception& e) {
        return ffi::Error::Internal(e.what());
    }
}

XLA_FFI_DEFINE_HANDLER(handler, call,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<std::string_view>("function")
                           .Attr<std::string_view>("operands")
                           .Attr<std::string_view>("results")
                           .Attr<ffi::Span<const double>>("options")
                           .Attr<std::int64_t>("threads"));

}  // namespace

void bind_xla(nb::module_& m) {
    m.def("xla_handler", [] { return nb::capsule(reinterpret_cast<void*>(+handler)); });
}

}  // namespace softdelta::python
