#include "api/overlap.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>

#include "api/check.h"
#include "core/quantised.h"

namespace softdelta::api {

namespace {

// Calls visit(stride in elements, size) for every dimension; a block of quantised numbers is one.
template <class Visit>
void for_dimensions(const Tensor& t, const Visit& visit) {
    const auto rank = static_cast<std::size_t>(t.rank);
    for (std::size_t i = 0; i < rank; ++i) {
        if (t.block == 0 || i + 1 < rank) {
            visit(t.stride[i], t.shape[i]);
        } else {
            visit(t.block_stride, t.shape[i] / t.block);
            visit(t.stride[i], t.dtype == core::DType::u8 ? core::bytes_of_halves : t.block);
        }
    }
}

// Bytes of a view: its first, relative to data, and how far its last element lies from its first.
struct Reach {
    Index first = 0, length = 0;
};

Index item_size(const Tensor& t) {
    return static_cast<Index>(core::size_of(t.dtype));
}

Reach reach_of(const Tensor& t) {
    Reach reach;
    for_dimensions(t, [&](Index stride, Index size) {
        const Index step = stride * item_size(t) * (size - 1);
        (step < 0 ? reach.first : reach.length) += step;
    });
    reach.length -= reach.first;
    return reach;
}

// All sums Σ step·n, 0 ≤ n ≤ most: the distances, in bytes, from the first element of one view to an element of the
// other.
class Distances {
  public:
    void add(const Tensor& t) {
        for_dimensions(t, [&](Index stride, Index size) {
            if (size > 1 && stride != 0) insert({std::abs(stride) * item_size(t), size - 1});
        });
    }

    // Whether one of them lies in [low, high].
    bool any_in(Index low, Index high) {
        merge();
        Index reach = 0, divisor = 0;
        for (std::size_t i = 0; i < count_; ++i) {
            terms_[i].reach = reach += terms_[i].step * terms_[i].most;
            terms_[i].divisor = divisor = std::gcd(divisor, terms_[i].step);
        }
        return any_in(count_, low, high);
    }

  private:
    struct Term {
        Index step, most;
        Index reach = 0, divisor = 0;  // of this term and all before it
    };

    // Kept in the order of steps.
    void insert(const Term& term) {
        std::size_t place = count_++;
        for (; place > 0 && terms_[place - 1].step > term.step; --place) terms_[place] = terms_[place - 1];
        terms_[place] = term;
    }

    // Steps that fill the gaps of a larger one become one with it: rows that lie one after the other,
    // and those of two views with the same strides.
    void merge() {
        std::size_t kept = 0;
        for (std::size_t i = 0; i < count_; ++i) {
            Term* last = kept > 0 ? &terms_[kept - 1] : nullptr;
            if (last != nullptr && terms_[i].step % last->step == 0 && terms_[i].step / last->step <= last->most + 1)
                last->most += terms_[i].step / last->step * terms_[i].most;
            else
                terms_[kept++] = terms_[i];
        }
        count_ = kept;
    }

    // Of the first `count` terms. The largest may be taken so often that the others can reach the range.
    bool any_in(std::size_t count, Index low, Index high) {
        if (high < 0) return false;
        if (low <= 0) return true;
        if (count == 0) return false;
        const Term& term = terms_[count - 1];
        if (low > term.reach || high / term.divisor * term.divisor < low) return false;
        if (--patience_ < 0) return true;
        const Index rest = term.reach - term.step * term.most;
        const Index least = low > rest ? (low - rest + term.step - 1) / term.step : 0;
        for (Index n = std::min(term.most, high / term.step); n >= least; --n)
            if (any_in(count - 1, low - n * term.step, high - n * term.step)) return true;
        return false;
    }

    std::array<Term, 2 * Tensor::max_rank> terms_{};
    std::size_t count_ = 0;
    int patience_ = 10000;  // strides of tensors take a handful of trials
};

// Whether two views have the same element at the same indices; pools may differ in their number of entries.
bool same_elements(const Tensor& a, const Tensor& b) {
    bool same = a.data == b.data && a.dtype == b.dtype && a.rank == b.rank;
    for (std::size_t i = 0; same && i < static_cast<std::size_t>(a.rank); ++i)
        same =
            (i == 0 || a.shape[i] == b.shape[i]) && (a.stride[i] == b.stride[i] || a.shape[i] == 1 || b.shape[i] == 1);
    return same;
}

}  // namespace

bool overlap(const Tensor& a, const Tensor& b) {
    if (a.count() == 0 || b.count() == 0) return false;
    const Reach ra = reach_of(a), rb = reach_of(b);
    const auto first = [](const Tensor& t, const Reach& r) {
        return reinterpret_cast<std::uintptr_t>(t.data) + static_cast<std::uintptr_t>(r.first);
    };
    const std::uintptr_t fa = first(a, ra), fb = first(b, rb);
    if (fa + static_cast<std::uintptr_t>(ra.length + item_size(a)) <= fb ||
        fb + static_cast<std::uintptr_t>(rb.length + item_size(b)) <= fa)
        return false;
    // Element x of a and y of b overlap when −size_a < (fa + x) − (fb + y) < size_b. x and length_b − y are sums of
    // steps of a and of b.
    const auto shift = static_cast<Index>(fb - fa) + rb.length;
    Distances distances;
    distances.add(a);
    distances.add(b);
    return distances.any_in(shift - item_size(a) + 1, shift + item_size(b) - 1);
}

Extent extent(const Tensor& t) {
    const Reach reach = reach_of(t);
    const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(t.data) + static_cast<std::uintptr_t>(reach.first);
    return {first, first + static_cast<std::uintptr_t>(reach.length + item_size(t))};
}

void Operands::add(const char* name, const Tensor& t, bool written) {
    if (!t || t.count() == 0) return;
    const auto [first, end] = extent(t);
    all_[count_++] = {name, &t, first, end, written};
}

void Operands::writes(const core::Execution& execution) {
    if (execution.stages.size() > most_stages)
        refuse("execution.stages.count", std::to_string(execution.stages.size()),
               std::to_string(most_stages) + " at most");
    for (const core::Stage& stage : execution.stages) add(stage.name.data(), stage.tensor, true);
    const auto add_memory = [this](const char* name, Tensor& memory, void* data, std::size_t bytes) {
        if (data == nullptr || bytes == 0) return;
        memory.data = data;
        memory.dtype = core::DType::boolean;
        memory.rank = 1;
        memory.shape[0] = static_cast<Index>(bytes);
        memory.stride[0] = 1;
        add(name, memory, true);
    };
    add_memory("execution.workspace", workspace_, execution.workspace, execution.workspace_size);
    add_memory("execution.gpu.kept", kept_, execution.kept, execution.kept_size);
}

void Operands::expect_apart(std::span<const InPlace> allowed) const {
    for (std::size_t i = 0; i < count_; ++i) {
        const Operand& a = all_[i];
        if (!a.written) continue;
        for (std::size_t j = 0; j < count_; ++j) {
            const Operand& b = all_[j];
            if (i == j || (b.written && j < i) || a.end <= b.first || b.end <= a.first) continue;
            const bool may_be_one = std::any_of(allowed.begin(), allowed.end(), [&](const InPlace& pair) {
                return pair.result == a.name && pair.operand == b.name;
            });
            if (may_be_one && same_elements(*a.tensor, *b.tensor)) continue;
            if (overlap(*a.tensor, *b.tensor))
                refuse(std::string(a.name) + ": memory", std::string("shared with ") + b.name,
                       may_be_one ? "the same elements, or none of them"
                                  : "memory of its own: results are written while others are still needed");
        }
    }
}

}  // namespace softdelta::api
