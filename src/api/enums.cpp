// The enumerations of the C interface, of C++ and of core have the same values, so that a cast converts them.
#include "core/attention.h"
#include "core/delta_rule.h"
#include "core/dtype.h"
#include "core/execution.h"
#include "core/layer/activation.h"
#include "core/rule.h"
#include "softdelta/softdelta.hpp"

namespace softdelta {

namespace {

// Of three values that stand for the same.
template <class C, class Cpp, class Core>
constexpr bool same(C c, Cpp cpp, Core core) {
    return static_cast<int>(c) == static_cast<int>(cpp) && static_cast<int>(c) == static_cast<int>(core);
}

static_assert(same(SOFTDELTA_CAUSAL_NONE, Causal::none, core::Causal::none));
static_assert(same(SOFTDELTA_CAUSAL_TOP_LEFT, Causal::top_left, core::Causal::top_left));
static_assert(same(SOFTDELTA_CAUSAL_BOTTOM_RIGHT, Causal::bottom_right, core::Causal::bottom_right));

static_assert(same(SOFTDELTA_EMPTY_ROW_MINUS_INFINITY, EmptyRow::minus_infinity, core::EmptyRow::minus_infinity));
static_assert(same(SOFTDELTA_EMPTY_ROW_PLUS_INFINITY, EmptyRow::plus_infinity, core::EmptyRow::plus_infinity));
static_assert(same(SOFTDELTA_EMPTY_ROW_ZERO, EmptyRow::zero, core::EmptyRow::zero));

static_assert(same(SOFTDELTA_ACTIVATION_NONE, Activation::none, core::Activation::none));
static_assert(same(SOFTDELTA_ACTIVATION_SILU, Activation::silu, core::Activation::silu));
static_assert(same(SOFTDELTA_ACTIVATION_SIGMOID, Activation::sigmoid, core::Activation::sigmoid));

static_assert(same(SOFTDELTA_HEAD_ORDER_GROUPED, HeadOrder::grouped, core::HeadOrder::grouped));
static_assert(same(SOFTDELTA_HEAD_ORDER_TILED, HeadOrder::tiled, core::HeadOrder::tiled));

// A rule of core is the row of its number.
constexpr int row_of(std::string_view name) {
    for (std::size_t i = 0; i < core::rules.size(); ++i)
        if (core::rules.at(i).name == name) return static_cast<int>(i);
    return -1;
}
static_assert(same(SOFTDELTA_RULE_DELTA, Rule::delta_rule, row_of("delta_rule")));
static_assert(same(SOFTDELTA_RULE_GATED_DELTA, Rule::gated_delta_rule, row_of("gated_delta_rule")));
static_assert(same(SOFTDELTA_RULE_KDA, Rule::kda, row_of("kda")));
static_assert(same(SOFTDELTA_RULE_COMBA, Rule::comba, row_of("comba")));
static_assert(same(SOFTDELTA_RULE_SIMPLE_GLA, Rule::simple_gla, row_of("simple_gla")));
static_assert(same(SOFTDELTA_RULE_GLA, Rule::gla, row_of("gla")));
static_assert(same(SOFTDELTA_RULE_GDN2, Rule::gdn2, row_of("gdn2")));
static_assert(same(SOFTDELTA_RULE_GATED_DELTA_PRODUCT, Rule::gated_delta_product, row_of("gated_delta_product")));
static_assert(same(SOFTDELTA_RULE_DPLR, Rule::dplr, row_of("dplr")));

static_assert(same(SOFTDELTA_GATE_NONE, RuleGate::none, core::Gate::none));
static_assert(same(SOFTDELTA_GATE_HEAD, RuleGate::head, core::Gate::scalar));
static_assert(same(SOFTDELTA_GATE_CHANNEL, RuleGate::channel, core::Gate::channel));
static_assert(same(SOFTDELTA_ERASES_FROM_DECAYED_STATE, RuleErases::from_decayed_state,
                   core::Erase::from_decayed_state));
static_assert(same(SOFTDELTA_ERASES_FROM_PREVIOUS_STATE, RuleErases::from_previous_state,
                   core::Erase::from_previous_state));
static_assert(same(SOFTDELTA_ERASES_NOTHING, RuleErases::nothing, core::Erase::nothing));

// The C interface has DLPack's types.
constexpr bool same(DType cpp, core::DType core) {
    return static_cast<int>(cpp) == static_cast<int>(core);
}
static_assert(same(DType::f64, core::DType::f64) && same(DType::f32, core::DType::f32));
static_assert(same(DType::bf16, core::DType::bf16) && same(DType::f16, core::DType::f16));
static_assert(same(DType::boolean, core::DType::boolean));
static_assert(same(DType::i32, core::DType::i32) && same(DType::i64, core::DType::i64));
static_assert(same(DType::i8, core::DType::i8) && same(DType::u8, core::DType::u8) && same(DType::f8, core::DType::f8));

static_assert(same(SOFTDELTA_BF16_PRODUCTS_AUTOMATIC, Bf16Products::automatic, core::Bf16Products::automatic));
static_assert(same(SOFTDELTA_BF16_PRODUCTS_F32, Bf16Products::f32, core::Bf16Products::f32));
static_assert(same(SOFTDELTA_BF16_PRODUCTS_BF16, Bf16Products::bf16, core::Bf16Products::bf16));

}  // namespace

}  // namespace softdelta
