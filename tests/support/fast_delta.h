// A drawn call of a delta rule for the fast engine: inputs and results each beside an unreadable page, results as dense
// tensors that the judge takes.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "support/guarded_results.h"
#include "support/random_delta.h"

namespace softdelta::test {

// What a forward pass keeps for the backward pass: the states every so many tokens, and u of this type.
struct Keep {
    Index interval = 0;  // 0: nothing
    DType u = DType::f32;
};

class FastDelta {
  public:
    using Names = test::Names;
    using Results = DenseResults;

    explicit FastDelta(RandomDelta&& drawn);

    const RandomDelta& drawn() const { return drawn_; }
    const io::Call& call() const { return call_; }
    std::string describe() const { return drawn_.describe(); }
    // Whether the draw has a feature, as "positive gate".
    bool has(std::string_view feature) const;

    // Every result that the call can have; a part of them, one at least.
    Names forward_names() const { return {"o", "final_state"}; }
    Names gradient_names() const;
    Names some(const Names& all) const;

    // Computes results in layouts drawn by the call's seed, in a workspace of exactly the bytes needed or in memory of
    // the engine's own. Throws when a byte was written that belongs to none.
    Results forward(const Names& names, const Execution& execution, Memory memory = Memory::own) const;
    // keep: what the engine's own forward pass gives to it.
    Results backward(const Names& names, const Execution& execution, Memory memory = Memory::own,
                     const Keep& keep = {}) const;

    // `states` and `u` of the forward pass, in layouts drawn by the call's seed.
    struct Kept {
        Guarded states, u;
    };
    Kept kept(const Keep& keep, const Execution& execution) const;
    // Something to keep or nothing, as the call's seed says.
    Keep drawn_keep() const;

  private:
    RandomDelta drawn_;
    Side side_;
    std::map<std::string, Guarded> given_;
    io::Call call_;
};

// A call with every option of the contract. The seed chooses between several chunks, wide heads, many short sequences,
// chunks and their rests in one head, head dimensions of models, and few heads over many tokens. It chooses the storage
// type too, if not told which.
RandomDelta draw_fast_delta_call(std::uint64_t seed, const std::vector<DType>& only = {});
FastDelta draw_fast_delta(std::uint64_t seed, const std::vector<DType>& only = {});

// The same for gradients: they may grow beyond f16 where states do, or where l2norm divides by nearly nothing, and such
// calls are of another type.
FastDelta draw_delta_for_gradients(std::uint64_t seed);

// Rules by their facts: any call, or one as matrix tiles take it.
FastDelta draw_rule_of_facts(std::uint64_t seed);

// gdn2 and dplr as matrix tiles take them: bf16, a multiple of 32 key channels, rows as they lie.
// Of other draws 1 in 500 is such a call.
FastDelta draw_own_keys_by_tiles(std::uint64_t seed);

// Sequences of 512 tokens and more and several heads, as matrix tiles take them.
FastDelta draw_long_sequence_by_tiles(std::uint64_t seed);

// Delta rules without gates, whose states begin large and are erased to nothing.
FastDelta draw_shrinking_states(std::uint64_t seed);

// The fast engine on one thread, products as the seed says.
Execution fast(std::uint64_t seed);

// What is wrong with the results; nothing: an empty text.
std::string judge_results(const FastDelta& call, const FastDelta::Results& results);

}  // namespace softdelta::test
