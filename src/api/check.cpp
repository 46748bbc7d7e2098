#include "api/check.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <utility>

#include "core/parallel.h"
#include "softdelta/judge.h"

namespace softdelta::api {

namespace {

constexpr Index farthest = Index{1} << 57;  // bytes, as most_elements

constexpr std::uint8_t dlpack_bool = 6, dlpack_f8_e4m3 = 10;  // of later versions; 0.6 has no names for them

core::DType import_dtype(const char* name, DLDataType type) {
    using core::DType;
    if (type.lanes == 1) {
        if (type.code == kDLFloat && type.bits == 64) return DType::f64;
        if (type.code == kDLFloat && type.bits == 32) return DType::f32;
        if (type.code == kDLFloat && type.bits == 16) return DType::f16;
        if (type.code == kDLBfloat && type.bits == 16) return DType::bf16;
        if (type.code == dlpack_bool && type.bits == 8) return DType::boolean;
        if (type.code == kDLUInt && type.bits == 8) return DType::u8;
        if (type.code == kDLInt && type.bits == 8) return DType::i8;
        if (type.code == dlpack_f8_e4m3 && type.bits == 8) return DType::f8;
        if (type.code == kDLInt && type.bits == 32) return DType::i32;
        if (type.code == kDLInt && type.bits == 64) return DType::i64;
    }
    refuse(name,
           "DLPack type code " + std::to_string(type.code) + ", " + std::to_string(type.bits) + " bits, " +
               std::to_string(type.lanes) + " lanes",
           "f64, f32, bf16, f16, bool, i32 or i64; i8, u8 or f8_e4m3 of k and v");
}

// Memory of the host that a GPU can read is the host's.
core::Device import_device(const char* name, DLDevice device) {
    switch (device.device_type) {
        case kDLCPU:
        case kDLCUDAHost:
            return {};
        case kDLCUDA:
            return {core::DeviceType::cuda, device.device_id};
        default:
            refuse(std::string(name) + ": device", "DLPack type " + std::to_string(device.device_type),
                   "CPU (1) or CUDA (2)");
    }
}

std::string size_text(const Size& size) {
    return std::to_string(size.value) + (*size.meaning == '\0' ? "" : std::string(" (") + size.meaning + ")");
}

// The smallest first: "1, 2 (key heads) or 8 (query heads)" of "H|Hk|1".
std::string size_text(const core::Dimension& dim, const Sizes& sizes) {
    std::string text;
    for (int i = dim.count; i-- > 0;) {
        if (!text.empty()) text += i == 0 ? " or " : ", ";
        text += size_text(sizes[dim.alternatives[static_cast<std::size_t>(i)]]);
    }
    return text;
}

std::size_t at(int dim) {
    return static_cast<std::size_t>(dim);
}

// Elements lie at their alignment, and no address of one lies beyond what an address can say. The stride of a dimension
// that is never stepped along may be anything, and is 0 from here on.
void check_addresses(const char* name, Tensor& t, std::uintptr_t data, std::uint64_t byte_offset, bool empty) {
    const auto item = static_cast<Index>(core::size_of(t.dtype));
    if (byte_offset > static_cast<std::uint64_t>(farthest))
        refuse(std::string(name) + ": byte_offset", std::to_string(byte_offset), "an offset within memory");
    const std::uintptr_t address = data + byte_offset;
    t.data = reinterpret_cast<void*>(address);
    Index before = 0, behind = item;  // bytes
    for (int i = 0; i < t.rank; ++i) {
        Index& stride = t.stride[at(i)];
        if (empty || t.shape[at(i)] == 1) {
            stride = 0;
            continue;
        }
        Index step = 0;  // by a product: a division takes as long as all else of a dimension
        if (__builtin_mul_overflow(stride, item * (t.shape[at(i)] - 1), &step) || step > farthest || step < -farthest)
            refuse(std::string(name) + ": stride of dimension " + std::to_string(i), std::to_string(stride),
                   "one that stays within memory");
        (step < 0 ? before : behind) += std::abs(step);
    }
    if (empty) return;
    if (const std::uintptr_t odd = address & static_cast<std::uintptr_t>(item - 1); odd != 0)
        refuse(std::string(name) + ": data + byte_offset",
               std::to_string(odd) + " bytes past a multiple of " + std::to_string(item),
               "elements aligned to their size");
    if (address < data || address < static_cast<std::uintptr_t>(before) ||
        address > std::numeric_limits<std::uintptr_t>::max() - static_cast<std::uintptr_t>(behind))
        refuse(std::string(name) + ": its strides", "beyond the first or last address", "elements within memory");
}

// Where the first index stands that is outside the pool or there a second time; otherwise how many there are. A step
// comes here for each token, so nothing is allocated: states are marked range by range, and ranges without an index are
// left out. visit(used, begin, end): the entries of a range that are used, once all of them are known.
template <class Entry, class Visit>
Index first_wrong_index(Index count, const Entry& entry, Index states, const Visit& visit) {
    constexpr Index range = 1 << 12;
    Index end = count, begin = 0;
    do {
        std::bitset<range> used;
        Index next = states;
        for (Index n = 0; n < end; ++n) {
            const Index i = entry(n);
            if (i == -1) continue;
            if (i < 0 || i >= states) {
                end = n;
            } else if (i >= begin + range) {
                next = std::min(next, i);
            } else if (i >= begin) {
                const auto bit = static_cast<std::size_t>(i - begin);
                if (used[bit]) end = n;
                used[bit] = true;
            }
        }
        visit(used, begin, begin + range);
        begin = next;
    } while (begin < states);
    return end;
}

// One of the indices [N] or [B, NT] in the order of rows.
inline Index index_at(const Tensor& t, Index i) {
    if (t.rank == 1) return core::load_index(t, i * t.stride[0]);
    return core::load_index(t, t.offset({i / t.shape[1], i % t.shape[1]}));
}
std::string index_name(const char* name, const Tensor& t, Index i) {
    std::string text = std::string(name) + "[";
    if (t.rank == 2) text += std::to_string(i / t.shape[1]) + ", ";
    return text + std::to_string(t.rank == 2 ? i % t.shape[1] : i) + "]";
}

}  // namespace

std::string shape_text(const Tensor& t) {
    std::string text = "[";
    for (std::size_t i = 0; i < static_cast<std::size_t>(t.rank); ++i)
        text += (i > 0 ? ", " : "") + std::to_string(t.shape[i]);
    return text + "]";
}

void refuse(const std::string& argument, const std::string& actual, const std::string& expected) {
    throw core::InvalidArgument(argument + " is " + actual + ", expected " + expected);
}

Tensor import(const char* name, const DLTensor* tensor) {
    Tensor t;
    if (tensor == nullptr) return t;
    t.device = import_device(name, tensor->device);
    if (tensor->ndim < 1 || tensor->ndim > Tensor::max_rank)
        refuse(std::string(name) + ": rank", std::to_string(tensor->ndim), "1 to " + std::to_string(Tensor::max_rank));
    if (tensor->shape == nullptr) refuse(std::string(name) + ": shape", "null", "an array");
    t.dtype = import_dtype(name, tensor->dtype);
    t.rank = tensor->ndim;
    Index count = 1, extent = 1;  // extent: a size of 0 counts as 1
    for (int i = t.rank; i-- > 0;) {
        const Index size = tensor->shape[i];
        if (size < 0 || __builtin_mul_overflow(extent, std::max<Index>(size, 1), &extent) || extent > most_elements)
            refuse(std::string(name) + ": dimension " + std::to_string(i), std::to_string(size),
                   "a size that memory can hold");
        t.shape[at(i)] = size;
        t.stride[at(i)] = tensor->strides != nullptr ? tensor->strides[i] : count;
        count *= size;
    }
    constexpr Index most_empty = Index{1} << 24;
    if (count == 0 && extent > most_empty)
        refuse(std::string(name) + ": shape", shape_text(t), "sizes that are not huge beside a 0");
    if (tensor->data == nullptr && count > 0)
        refuse(std::string(name) + ": data", "null", "memory of its " + shape_text(t));
    check_addresses(name, t, reinterpret_cast<std::uintptr_t>(tensor->data), tensor->byte_offset, count == 0);
    return t;
}

void expect_memory(const char* what, std::initializer_list<Index> sizes) {
    Index count = 1;
    for (const Index size : sizes) {
        if (size > 0 && count > most_elements / size) refuse(what, "too large", "what memory can hold");
        count *= std::max<Index>(size, 1);
    }
}

std::string device_text(core::Device device) {
    return device.is_cpu() ? "cpu" : "cuda:" + std::to_string(device.id);
}

void expect_device(const char* name, const Tensor& t, core::Kind kind, core::Device device, const char* first) {
    const bool lengths_on_host = kind == core::Kind::integer && t.device.is_cpu();
    if (t.device == device || lengths_on_host) return;
    refuse(std::string(name) + ": device", device_text(t.device), device_text(device) + ", where " + first + " is");
}

void expect_rank(const char* name, const Tensor& t, const core::Shape& shape) {
    if (t && t.rank != shape.rank)
        refuse(std::string(name) + ": shape", shape_text(t),
               std::to_string(shape.rank) + " dimensions " + core::text_of(shape));
}

void expect_size(const char* name, const Tensor& t, int dim, const Size& size) {
    if (t && t.shape[at(dim)] != size.value)
        refuse(std::string(name) + ": dimension " + std::to_string(dim), std::to_string(t.shape[at(dim)]),
               size_text(size));
}

void expect_shape(const char* name, const Tensor& t, const core::Shape& shape, const Sizes& sizes) {
    if (!t) return;
    expect_rank(name, t, shape);
    for (int i = 0; i < shape.rank; ++i) {
        const core::Dimension& dim = shape.dims[at(i)];
        bool fits = false;
        for (int j = 0; j < dim.count && !fits; ++j) {
            const Index value = sizes[dim.alternatives[at(j)]].value;
            fits = value == Size::unknown || value == t.shape[at(i)];
        }
        if (!fits)
            refuse(std::string(name) + ": dimension " + std::to_string(i), std::to_string(t.shape[at(i)]),
                   size_text(dim, sizes));
    }
}

void expect_kind(const char* name, const Tensor& t, core::Kind kind) {
    if (!t) return;
    const auto refuse_type = [&](const char* expected) {
        refuse(std::string(name) + ": type", core::name_of(t.dtype), expected);
    };
    if (kind == core::Kind::floating && !core::is_float(t.dtype)) refuse_type("f64, f32, bf16 or f16");
    if (kind == core::Kind::integer && !core::is_integer(t.dtype)) refuse_type("i32 or i64");
    if (kind == core::Kind::boolean && t.dtype != core::DType::boolean) refuse_type("bool");
}

void expect_writable(const char* name, const Tensor& t) {
    if (t.count() == 0) return;
    // |stride|, size, in order; a dense layout in any order, with any gaps, nests
    std::array<std::pair<Index, Index>, Tensor::max_rank> dims;
    auto* end = dims.data();
    for (int i = 0; i < t.rank; ++i) {
        if (t.shape[at(i)] <= 1) continue;
        const std::pair dim{std::abs(t.stride[at(i)]), t.shape[at(i)]};
        auto* place = std::upper_bound(dims.data(), end, dim);
        std::move_backward(place, end, end + 1);
        *place = dim;
        ++end;
    }
    Index reach = 0;
    for (const auto& [stride, size] : std::span(dims.data(), end)) {
        if (stride <= reach)
            refuse(std::string(name) + ": a stride", std::to_string(stride),
                   "more than " + std::to_string(reach) + ": elements of a result must not overlap");
        reach += stride * (size - 1);
    }
}

void expect_present(const char* name, const Tensor& t, const char* why) {
    if (!t) refuse(name, "missing", std::string("a tensor: ") + why);
}

void expect_absent(const char* name, const Tensor& t, const char* why) {
    if (t) refuse(name, "given", std::string("none: ") + why);
}

std::string number_text(double value) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%g", value);
    return text.data();
}

bool fits_f32(double value) {
    return std::abs(value) <= static_cast<double>(std::numeric_limits<float>::max());
}

void expect_f32(const char* name, double value) {
    if (!fits_f32(value)) refuse(name, number_text(value), "a finite number that f32 can hold");
}

void expect_gradient(const char* name, const Tensor& gradient, const Tensor& input) {
    if (!gradient) return;
    expect_present(name + 1, input, "its gradient is asked for");
    if (gradient.rank != input.rank)
        refuse(std::string(name) + ": shape", shape_text(gradient),
               std::to_string(input.rank) + " dimensions as its input");
    for (int i = 0; i < input.rank; ++i) expect_size(name, gradient, i, {input.shape[at(i)], "as its input"});
    expect_kind(name, gradient, core::Kind::floating);
    expect_writable(name, gradient);
}

Index expect_cumulative(const char* name, const Tensor& t, Index total, const char* total_name) {
    expect_kind(name, t, core::Kind::integer);
    expect_rank(name, t, "N+1");
    if (t.shape[0] < 1) refuse(std::string(name) + ": dimension 0", "0", "sequences + 1");
    if (!t.device.is_cpu()) return total;
    const auto entry = [&](Index i) { return core::load_index(t, i * t.stride[0]); };
    const auto label = [&](Index i) { return std::string(name) + "[" + std::to_string(i) + "]"; };
    if (entry(0) != 0) refuse(label(0), std::to_string(entry(0)), "0");
    Index longest = 0;
    for (Index i = 1; i < t.shape[0]; ++i) {
        if (entry(i) < entry(i - 1))
            refuse(label(i), std::to_string(entry(i)),
                   "at least " + std::to_string(entry(i - 1)) + ", the entry before");
        longest = std::max(longest, entry(i) - entry(i - 1));
    }
    const Index last = t.shape[0] - 1;
    if (entry(last) != total)
        refuse(label(last), std::to_string(entry(last)), std::to_string(total) + " (" + total_name + ")");
    return longest;
}

namespace {

[[noreturn]] void refuse_index(const std::string& label, Index i, Index states, const char* otherwise) {
    refuse(label, std::to_string(i),
           i >= 0 && i < states ? "an entry that no other sequence uses"
                                : "0 to " + std::to_string(states - 1) + ", or -1 where " + otherwise);
}

}  // namespace

void expect_state_indices(const PoolIndices& indices, const Tensor& initial_state, const Tensor& final_state) {
    const Tensor &read = indices.state, &written = indices.final_state ? indices.final_state : indices.state;
    if (!written && !indices.snapshot) return;
    for (const auto& [name, t] :
         {std::pair{"final_state_indices", &indices.final_state}, std::pair{"snapshot_indices", &indices.snapshot}})
        if (*t && !final_state)
            refuse("final_state", "missing", std::string("a tensor: ") + name + " says where in it");
    if (!written)
        refuse("state_indices", "missing",
               "indices, or final_state_indices: snapshot_indices makes final_state a pool");
    for (const Tensor* t : {&read, &written, &indices.has_initial, &indices.snapshot})
        if (*t && !t->device.is_cpu()) return;
    const Tensor& pool = final_state ? final_state : initial_state;
    if (!pool) return;
    const Index states = pool.shape[0], sequences = written.shape[0];
    const Index count = sequences + (indices.snapshot ? indices.snapshot.count() : 0);
    const auto entry = [&](Index i) -> Index {
        if (i >= sequences) return index_at(indices.snapshot, i - sequences);
        const Index from = read ? index_at(read, i) : i;
        return indices.final_state && from != -1 ? index_at(written, i) : from;
    };
    const auto begins_from = [&](Index i) -> Index {
        const Tensor& given = indices.has_initial;
        if (given && core::load(given, i * given.stride[0]) == 0) return -1;
        return read ? index_at(read, i) : i;
    };
    const bool apart = indices.final_state || indices.snapshot;  // else a sequence reads what it alone writes
    const auto expect_unread = [&](const auto& used, Index begin, Index end) {
        for (Index i = 0; apart && initial_state.data == pool.data && i < sequences; ++i) {
            const Index from = begins_from(i);
            if (from >= begin && from < end && used[static_cast<std::size_t>(from - begin)] && entry(i) != from)
                refuse(read ? index_name("state_indices", read, i) : "initial_state of sequence " + std::to_string(i),
                       read ? std::to_string(from) : "entry " + std::to_string(from),
                       "an entry that is not written for another sequence");
        }
    };
    const Index n = first_wrong_index(count, entry, states, expect_unread);
    if (n < sequences && !indices.final_state && initial_state && entry(n) >= states &&
        entry(n) < initial_state.shape[0])
        refuse("final_state: dimension 0", std::to_string(states),
               std::to_string(initial_state.shape[0]) + ", a pool as initial_state: " +
                   index_name("state_indices", read, n) + " is " + std::to_string(entry(n)));
    if (n < sequences && !indices.final_state)
        refuse_index(index_name("state_indices", read, n), entry(n), initial_state ? initial_state.shape[0] : states,
                     "there is no sequence");
    if (n < sequences) refuse_index(index_name("final_state_indices", written, n), entry(n), states, "none is written");
    if (n < count)
        refuse_index(index_name("snapshot_indices", indices.snapshot, n - sequences), entry(n), states, "none is kept");
    const bool may_lie_beyond = read && initial_state && (indices.final_state || initial_state.shape[0] < states);
    for (Index i = 0; may_lie_beyond && i < sequences; ++i)
        if (const Index from = index_at(read, i); from < -1 || from >= initial_state.shape[0])
            refuse_index(index_name("state_indices", read, i), from, initial_state.shape[0], "there is no sequence");
}

core::Limits check_limits(const softdelta_limits* limits) {
    const softdelta_limits given = read_struct("limits", limits);
    for (const auto& [name, value] : {std::pair{"limits.sequences", given.sequences},
                                      std::pair{"limits.tokens", given.tokens}, std::pair{"limits.keys", given.keys}})
        if (value < 0 || value > most_elements) refuse(name, std::to_string(value), "0 to what memory can hold");
    return {given.sequences, given.tokens, given.keys};
}

bool expect_flag(const char* name, std::int32_t value) {
    if (value != 0 && value != 1) refuse(name, std::to_string(value), "0 or 1");
    return value == 1;
}

namespace {

template <class T>
T read_or_default(const char* name, const T* given, const T& otherwise) {
    return given != nullptr ? read_struct(name, given) : otherwise;
}

void expect_memory_of(const char* name, const void* memory, std::size_t size) {
    if (memory == nullptr && size != 0) refuse(name, "null", "memory of its size, " + std::to_string(size));
    if (memory != nullptr && size > static_cast<std::size_t>(farthest))
        refuse(std::string(name) + "_size", std::to_string(size), "a size that memory can hold");
}

// An array of structures of the size that the first one has: a caller's version may differ from this one.
softdelta_stage stage_at(const softdelta_stages& given, std::size_t i) {
    const auto* first = reinterpret_cast<const unsigned char*>(given.wanted);
    const std::string name = "execution.stages.wanted[" + std::to_string(i) + "]";
    const softdelta_stage stage =
        read_struct(name.c_str(), reinterpret_cast<const softdelta_stage*>(first + i * given.wanted->size));
    if (stage.size != given.wanted->size)
        refuse(name + ".size", std::to_string(stage.size), std::to_string(given.wanted->size) + ", as the first");
    if (stage.name == nullptr) refuse(name + ".name", "null", "a stage's name");
    return stage;
}

void check_stages(core::Execution& e, const softdelta_stages* stages, const engines::Engine* engine) {
    const softdelta_stages given = read_or_default("execution.stages", stages, softdelta_stages_default());
    constexpr std::int64_t known[] = {1, 16, 32, 64, 96, 128};
    if (std::find(std::begin(known), std::end(known), given.chunk_size) == std::end(known))
        refuse("execution.stages.chunk_size", std::to_string(given.chunk_size), "1, 16, 32, 64, 96 or 128");
    e.chunk_size = given.chunk_size;
    if (given.count > 0 && (engine == nullptr || engine->check_attention_stages == nullptr))
        refuse("execution.stages.count", std::to_string(given.count), "0: only the stages engines have intermediates");
    if (given.count > 0 && given.wanted == nullptr)
        refuse("execution.stages.wanted", "null", "an array of count entries");
    for (std::size_t i = 0; i < given.count; ++i) {
        const softdelta_stage stage = stage_at(given, i);
        for (const core::Stage& other : e.stages)
            if (other.name == stage.name) refuse(stage.name, "wanted twice", "one tensor for a stage");
        const Tensor t = import(stage.name, stage.tensor);
        expect_present(stage.name, t, "a stage is written to it");
        expect_kind(stage.name, t, core::Kind::floating);
        expect_writable(stage.name, t);
        e.stages.push_back({stage.name, t});
    }
}

void check_rounding(core::Execution& e, const softdelta_rounding* rounding, const engines::Engine* engine) {
    const softdelta_rounding given = read_or_default("execution.rounding", rounding, softdelta_rounding_default());
    const bool rounds = engine != nullptr && engine->rounds;
    e.rounding_seed = given.seed;
    if (given.seed != 0 && !rounds)
        refuse("execution.rounding.seed", std::to_string(given.seed), "0: only stages_f32 rounds");
    e.shortcuts = expect_flag("execution.rounding.shortcuts", given.shortcuts);
    if (e.shortcuts && !rounds) refuse("execution.rounding.shortcuts", "1", "0: only stages_f32 takes shortcuts");
    e.float_scores = expect_flag("execution.rounding.float_scores", given.float_scores);
    if (e.float_scores && (engine == nullptr || !engine->rounds_scores))
        refuse("execution.rounding.float_scores", "1", "0: only the reference rounds scores");
}

core::Handover check_gpu(core::Execution& e, const softdelta_gpu* gpu, Family family) {
    const softdelta_gpu given = read_or_default("execution.gpu", gpu, softdelta_gpu_default());
    if (family == Family::other) {
        for (const auto& [name, pointer] :
             {std::pair{"execution.gpu.state_ready", given.state_ready},
              std::pair{"execution.gpu.state_done", given.state_done}, std::pair{"execution.gpu.kept", given.kept}})
            if (pointer != nullptr) refuse(name, "given", "null: it is for calls of delta rules");
    }
    expect_memory_of("execution.gpu.kept", given.kept, given.kept_size);
    e.kept = given.kept;
    e.kept_size = given.kept_size;
    return {given.state_ready, given.state_done};
}

}  // namespace

CheckedExecution check_execution(const softdelta_execution* execution, Family family) {
    core::Execution e;
    core::short_call_bytes();  // throws where the environment has nonsense
    if (execution == nullptr) return {e, {}, {}};
    const softdelta_execution given = read_struct("execution", execution);
    const WantedEngine engine = wanted_engine(given.engine);
    if (given.bf16_products < SOFTDELTA_BF16_PRODUCTS_AUTOMATIC || given.bf16_products > SOFTDELTA_BF16_PRODUCTS_BF16)
        refuse("execution.bf16_products", std::to_string(given.bf16_products), "0 to 2");
    e.bf16_products = static_cast<core::Bf16Products>(given.bf16_products);
    expect_memory_of("execution.workspace", given.workspace, given.workspace_size);
    e.workspace = given.workspace;
    e.workspace_size = given.workspace_size;
    if (given.threads < 0) refuse("execution.threads", std::to_string(given.threads), "0 or more");
    e.threads = given.threads;
    e.parallel_for = {given.parallel_for, given.parallel_context};
    e.stream = given.stream;
    const core::Handover handover = check_gpu(e, given.gpu, family);
    check_stages(e, given.stages, engine.named);
    check_rounding(e, given.rounding, engine.named);
    return {e, engine, handover};
}

}  // namespace softdelta::api
