#include "python/native/views.h"

#include <stdexcept>
#include <string>

namespace softdelta::python {

// What DLPack 1 adds to the header of DLPack 0.6.
struct DLPackVersion {
    std::uint32_t major, minor;
};
struct VersionedTensor {
    DLPackVersion version;
    void* manager_ctx;
    void (*deleter)(VersionedTensor*);
    std::uint64_t flags;
    DLTensor dl_tensor;
};
struct ExchangeTable {
    DLPackVersion version;
    ExchangeTable* previous;
    int (*managed_tensor_allocator)(DLTensor* like, VersionedTensor** out, void* error_context,
                                    void (*set_error)(void* error_context, const char* kind, const char* message));
    void* managed_tensor_from_object;
    void* managed_tensor_to_object;
    int (*tensor_from_object)(void* object, DLTensor* out);                         // may be null
    int (*current_work_stream)(DLDeviceType type, std::int32_t id, void** stream);  // may be null
};

namespace {

constexpr std::uint64_t read_only = 1;

[[noreturn]] void refuse(const char* name, const std::string& actual, const std::string& expected) {
    throw nb::value_error((std::string(name) + " is " + actual + ", expected " + expected).c_str());
}

// The exchange table of a type, null without one. Few types ever come, so that they are kept for good.
const ExchangeTable* exchange_table(PyTypeObject* type) {
    struct Known {
        PyTypeObject* type;
        const ExchangeTable* table;
    };
    static std::array<Known, 8> known{};
    static std::size_t count = 0;
    for (std::size_t i = 0; i < count; ++i)
        if (known[i].type == type) return known[i].table;

    const ExchangeTable* table = nullptr;
    if (PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__")) {
        if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
            table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        Py_DECREF(capsule);
    }
    PyErr_Clear();
    while (table != nullptr && table->version.major != 1) table = table->previous;
    if (table != nullptr && table->tensor_from_object == nullptr) table = nullptr;
    if (count < known.size()) {
        Py_INCREF(reinterpret_cast<PyObject*>(type));
        known[count++] = {type, table};
    }
    return table;
}

// The type of one element of a buffer; code 255 when we have none.
DLDataType type_of_format(const Py_buffer& buffer) {
    const char* format = buffer.format != nullptr ? buffer.format : "B";
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    const auto bits = static_cast<std::uint8_t>(buffer.itemsize * 8);
    switch (format[1] == '\0' ? *format : '\0') {
        case 'e':
        case 'f':
        case 'd':
            return {kDLFloat, bits, 1};
        case '?':
            return {6, bits, 1};
        case 'b':
        case 'i':
        case 'l':
        case 'q':
            return {kDLInt, bits, 1};
        case 'B':
        case 'H':
            return {kDLUInt, bits, 1};
        default:
            return {255, bits, 1};
    }
}

std::string python_type(nb::handle object) {
    return nb::str(object.type().attr("__name__")).c_str();
}

// A tensor without memory, or one whose numbers lie in no array: its library says why, some with a trace of calls.
[[noreturn]] void refuse_unreadable(const char* name, const nb::python_error& error) {
    const std::string why = nb::str(error.value()).c_str();
    throw nb::value_error((std::string(name) + " cannot be read: " + why.substr(0, why.find('\n'))).c_str());
}

// What __dlpack__ gives; old ones know nothing of versions.
nb::object capsule_of(const nb::object& method) {
    try {
        return method(nb::arg("max_version") = nb::make_tuple(1, 0));
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) throw;
    }
    return method();
}

// Torch has views whose numbers are the negatives of those in memory; neither its table nor its capsules tell.
void refuse_negated(const char* name, nb::handle object) {
    static PyObject* const method = PyUnicode_InternFromString("is_neg");
    PyObject* self = object.ptr();
    PyObject* answer = PyObject_VectorcallMethod(method, &self, 1, nullptr);
    if (answer == nullptr) PyErr_Clear();
    Py_XDECREF(answer);
    if (answer == Py_True)
        refuse(name, "a view of other numbers, negated", "numbers as they lie in memory: resolve_neg()");
}

// A tensor of torch whose gradient is recorded makes no capsule; what it is made of does.
nb::object detached(nb::handle object) {
    const nb::object recorded = nb::getattr(object, "requires_grad", nb::none());
    return recorded.ptr() == Py_True ? object.attr("detach")() : nb::borrow(object);
}

}  // namespace

Views::~Views() {
    if (memory_ != nullptr && memory_->deleter != nullptr) memory_->deleter(memory_);
    for (std::size_t i = 0; i < used_; ++i) {
        if (slots_[i].buffer.obj != nullptr) PyBuffer_Release(&slots_[i].buffer);
        Py_XDECREF(slots_[i].capsule);
    }
}

DLTensor* Views::view(const char* name, nb::handle object, bool written, bool heads_first) {
    if (object.is_none()) return nullptr;
    if (used_ == most) refuse(name, "operand " + std::to_string(most + 1), std::to_string(most) + " at most");
    Slot& slot = slots_[used_++];
    if (!from_exchange_table(slot, name, object) && !from_buffer(slot, name, object, written))
        from_capsule(slot, name, object, written);
    DLTensor& t = slot.view;
    if (t.device.device_type != kDLCPU && t.device.device_type != kDLCUDAHost) take_stream(name, object, t.device);
    if (t.ndim == 0) refuse(name, "a scalar", "one or more dimensions");
    if (uint16_is_bf16_ && t.dtype.code == kDLUInt && t.dtype.bits == 16) t.dtype.code = kDLBfloat;
    if (heads_first && t.ndim == 4) swap_rows_and_heads(slot);
    return &t;
}

// Work on a GPU is ordered by its library's stream, which only the exchange table tells.
void Views::take_stream(const char* name, nb::handle object, DLDevice device) {
    if (device.device_type != kDLCUDA)
        refuse(name, "on device type " + std::to_string(device.device_type) + " of DLPack", "on the CPU or a CUDA GPU");
    const ExchangeTable* table = exchange_table(Py_TYPE(object.ptr()));
    if (table == nullptr || table->current_work_stream == nullptr)
        refuse(name, "on a GPU", "a tensor with DLPack's exchange table (torch 2.10 or later) or one on the CPU");
    if (table->current_work_stream(device.device_type, device.device_id, &stream_) != 0) throw nb::python_error();
    gpu_ = device;
    gpu_table_ = table;
}

void* Views::memory(std::size_t bytes) {
    auto count = static_cast<std::int64_t>(bytes);
    DLTensor like{};
    like.device = gpu_;
    like.ndim = 1;
    like.dtype = {kDLUInt, 8, 1};
    like.shape = &count;
    std::string error;
    const auto keep = [](void* text, const char*, const char* message) { *static_cast<std::string*>(text) = message; };
    if (gpu_table_->managed_tensor_allocator(&like, &memory_, &error, keep) != 0)
        throw std::runtime_error("memory for the call: " + error);
    return static_cast<std::byte*>(memory_->dl_tensor.data) + memory_->dl_tensor.byte_offset;
}

void Views::swap_rows_and_heads(Slot& slot) {
    DLTensor& t = slot.view;
    const std::int64_t* n = t.shape;
    if (t.strides == nullptr)
        slot.stride = {n[1] * n[2] * n[3], n[3], n[2] * n[3], 1};
    else
        slot.stride = {t.strides[0], t.strides[2], t.strides[1], t.strides[3]};
    slot.shape = {n[0], n[2], n[1], n[3]};
    t.shape = slot.shape.data();
    t.strides = slot.stride.data();
}

bool Views::from_exchange_table(Slot& slot, const char* name, nb::handle object) {
    const ExchangeTable* table = exchange_table(Py_TYPE(object.ptr()));
    if (table == nullptr) return false;
    if (table->tensor_from_object(object.ptr(), &slot.view) != 0) refuse_unreadable(name, nb::python_error());
    refuse_negated(name, object);
    return true;
}

bool Views::from_buffer(Slot& slot, const char* name, nb::handle object, bool written) {
    if (PyObject_CheckBuffer(object.ptr()) == 0) return false;
    if (PyObject_GetBuffer(object.ptr(), &slot.buffer, PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
        PyErr_Clear();  // bf16 of JAX: its buffers have no such format, DLPack does
        return false;
    }
    const Py_buffer& b = slot.buffer;
    if (written && b.readonly != 0) refuse(name, "read-only", "an array to write to");
    const auto rank = static_cast<std::size_t>(b.ndim);
    if (rank > max_rank) refuse(name, "of " + std::to_string(rank) + " dimensions", "6 at most");
    slot.view.data = b.buf;
    slot.view.device = {kDLCPU, 0};
    slot.view.ndim = b.ndim;
    slot.view.dtype = type_of_format(b);
    slot.view.shape = slot.shape.data();
    slot.view.strides = slot.stride.data();
    if (slot.view.dtype.code == 255)
        refuse(name, std::string("of format '") + (b.format != nullptr ? b.format : "") + "'",
               "f64, f32, f16, bf16, bool, i32 or i64");
    for (std::size_t i = 0; i < rank; ++i) {
        if (b.strides[i] % b.itemsize != 0) refuse(name, "strided by parts of an element", "whole elements");
        slot.shape[i] = b.shape[i];
        slot.stride[i] = b.strides[i] / b.itemsize;
    }
    return true;
}

void Views::from_capsule(Slot& slot, const char* name, nb::handle object, bool written) {
    refuse_negated(name, object);
    PyObject* method = PyObject_GetAttrString(detached(object).ptr(), "__dlpack__");
    if (method == nullptr) {
        PyErr_Clear();
        throw nb::type_error((std::string(name) + " is " + python_type(object) +
                              ", expected a tensor that speaks DLPack or the buffer protocol")
                                 .c_str());
    }
    try {
        slot.capsule = capsule_of(nb::steal(method)).release().ptr();
    } catch (const nb::python_error& error) {
        refuse_unreadable(name, error);
    }
    if (PyCapsule_IsValid(slot.capsule, "dltensor_versioned") != 0) {
        const auto* t = static_cast<VersionedTensor*>(PyCapsule_GetPointer(slot.capsule, "dltensor_versioned"));
        if (t->version.major != 1) refuse(name, "of DLPack " + std::to_string(t->version.major), "DLPack 1");
        if (written && (t->flags & read_only) != 0) refuse(name, "read-only", "an array to write to");
        slot.view = t->dl_tensor;
    } else if (PyCapsule_IsValid(slot.capsule, "dltensor") != 0) {
        slot.view = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(slot.capsule, "dltensor"))->dl_tensor;
    } else {
        refuse(name, "without a DLPack capsule", "one from __dlpack__");
    }
}

}  // namespace softdelta::python
