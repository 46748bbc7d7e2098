#include "io/call/metadata.h"

#include <span>

#include "io/file/entry.h"

namespace softdelta::io {
namespace {

struct Key {
    std::string_view name;
    void (*read)(Call& call, const Entry& entry);
};

Causal causal_of(const Entry& entry) {
    return entry.choice<Causal>(
        "none, top_left or bottom_right",
        {{"none", Causal::none}, {"top_left", Causal::top_left}, {"bottom_right", Causal::bottom_right}});
}

EmptyRow empty_row_of(const Entry& entry) {
    return entry.choice<EmptyRow>("minus_infinity, plus_infinity or zero",
                                  {{"minus_infinity", EmptyRow::minus_infinity},
                                   {"plus_infinity", EmptyRow::plus_infinity},
                                   {"zero", EmptyRow::zero}});
}

HeadOrder head_order_of(const Entry& entry) {
    return entry.choice<HeadOrder>("grouped or tiled", {{"grouped", HeadOrder::grouped}, {"tiled", HeadOrder::tiled}});
}

double softcap_of(const Entry& entry) {
    const double softcap = entry.number();
    if (softcap < 0) entry.refuse("0 (off) or a positive number");
    return softcap;
}

// Rows of a kernel's chunk; sums of longer ones are no kernel's.
std::int64_t chunk_size_of(const Entry& entry) {
    const std::int64_t rows = entry.integer(1);
    if (rows > 1024) entry.refuse("1 to 1024");
    return rows;
}

std::int32_t steps_of(const Entry& entry) {
    const std::int64_t steps = entry.integer(1);
    if (steps > 64) entry.refuse("1 to 64");
    return static_cast<std::int32_t>(steps);
}

void skip(Call&, const Entry&) {}

constexpr Key common_keys[] = {
    {"op", skip},
    {"producer", skip},
    {"chunk_size", [](Call& c, const Entry& e) { c.chunk_size = chunk_size_of(e); }},
};

constexpr Key attention_keys[] = {
    {"scale", [](Call& c, const Entry& e) { c.attention_options.scale = e.number(); }},
    {"causal", [](Call& c, const Entry& e) { c.attention_options.causal = causal_of(e); }},
    {"window_left", [](Call& c, const Entry& e) { c.attention_options.window_left = e.integer(-1); }},
    {"window_right", [](Call& c, const Entry& e) { c.attention_options.window_right = e.integer(-1); }},
    {"softcap", [](Call& c, const Entry& e) { c.attention_options.softcap = softcap_of(e); }},
    {"empty_row", [](Call& c, const Entry& e) { c.attention_options.empty_row = empty_row_of(e); }},
    {"top_w", [](Call& c, const Entry& e) { c.attention_options.top_w = e.integer(-1); }},
};

constexpr Key delta_keys[] = {
    {"scale", [](Call& c, const Entry& e) { c.delta_options.scale = e.number(); }},
    {"use_qk_l2norm_in_kernel", [](Call& c, const Entry& e) { c.delta_options.use_qk_l2norm_in_kernel = e.truth(); }},
    {"use_gate_in_kernel", [](Call& c, const Entry& e) { c.delta_options.use_gate_in_kernel = e.truth(); }},
    {"lower_bound", [](Call& c, const Entry& e) { c.delta_options.lower_bound = e.number(); }},
    {"safe_gate", [](Call&, const Entry& e) { e.truth(); }},  // a kernel's method: the result is the same
    {"state_v_first", [](Call& c, const Entry& e) { c.delta_options.state_v_first = e.truth(); }},
    {"allow_neg_eigval", [](Call& c, const Entry& e) { c.delta_options.allow_neg_eigval = e.truth(); }},
    {"head_order", [](Call& c, const Entry& e) { c.delta_options.head_order = head_order_of(e); }},
    {"steps", [](Call& c, const Entry& e) { c.delta_options.steps = steps_of(e); }},
    {"use_beta_sigmoid_in_kernel",
     [](Call& c, const Entry& e) { c.delta_options.use_beta_sigmoid_in_kernel = e.truth(); }},
};

const Key* find_key(std::span<const Key> keys, std::string_view name) {
    for (const Key& key : keys)
        if (key.name == name) return &key;
    return nullptr;
}

}  // namespace

void read_options(const CaseFile& file, Call& call) {
    const std::span<const Key> own = call.is_attention ? std::span<const Key>(attention_keys) : delta_keys;
    const std::span<const Key> other = call.is_attention ? std::span<const Key>(delta_keys) : attention_keys;
    for (const auto& [key, text] : file.metadata) {
        const Key* known = find_key(common_keys, key);
        if (known == nullptr) known = find_key(own, key);
        if (known != nullptr)
            known->read(call, {key, text});
        else if (find_key(other, key) != nullptr)
            call.warnings.push_back("metadata " + quote(key) + " is no option of " + call.op + " and was ignored");
        else
            call.warnings.push_back("metadata " + quote(key) + " is unknown and was ignored");
    }
}

}  // namespace softdelta::io
