#include "engines/stages/delta_rule/intermediates.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "engines/stages/stages.h"

namespace softdelta::stages::delta {

namespace {

enum class Layout { keys, values, pairs, gate, states };

struct Known {
    std::string_view name;
    Layout layout;
    bool of_erasing;
};

constexpr Known all_known[] = {
    {"A", Layout::pairs, true},        {"L", Layout::pairs, true},
    {"Aqk", Layout::pairs, false},     {"w", Layout::keys, true},
    {"u", Layout::values, true},       {"qg", Layout::keys, false},
    {"kg", Layout::keys, false},       {"h", Layout::states, false},
    {"v_new", Layout::values, false},  {"dv_local", Layout::values, false},
    {"du", Layout::values, false},     {"dh", Layout::states, false},
    {"dw", Layout::keys, true},        {"dA", Layout::pairs, true},
    {"dL", Layout::pairs, true},       {"dL_solve", Layout::pairs, true},
    {"dAqk", Layout::pairs, false},    {"dq_state", Layout::keys, false},
    {"dq_intra", Layout::keys, false}, {"dk_state", Layout::keys, false},
    {"dk_intra", Layout::keys, false}, {"dg_q", Layout::gate, false},
    {"dg_k", Layout::gate, false},     {"dg_p", Layout::gate, true},
    {"dg_local", Layout::gate, false}, {"dg_difference", Layout::gate, false},
    {"dg_spans", Layout::gate, false}, {"dg_terms", Layout::gate, false},
};

std::string write_shape(const std::vector<Index>& shape) {
    std::string text;
    for (const Index size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "[" + text + "]";
}

std::vector<Index> shape_of(Layout layout, const core::DeltaInputs& in, const core::DeltaOptions& options,
                            Index chunk_size, Index chunks) {
    const Index B = in.v.shape[0], T = in.v.shape[1], HV = in.v.shape[2], K = in.k.shape[3], V = in.v.shape[3];
    switch (layout) {
        case Layout::keys:
            return {B, T, HV, K};
        case Layout::values:
            return {B, T, HV, V};
        case Layout::pairs:
            return {B, T, HV, chunk_size};
        case Layout::gate:
            if (options.rule.gate == core::Gate::channel) return {B, T, HV, K};
            return {B, T, HV};
        case Layout::states:
            return {B, chunks, HV, K, V};
    }
    return {};
}

// Number of intervals in a row of the batch.
Index count_intervals(const core::DeltaInputs& in, Index interval) {
    if (!in.cu_seqlens) return (in.v.shape[1] + interval - 1) / interval;
    Index count = 0;
    for (Index n = 0; n < core::sequence_count(in); ++n)
        count += (core::sequence(in, n).count + interval - 1) / interval;
    return count;
}

}  // namespace

std::vector<Index> count_intervals_before(const core::DeltaInputs& in, Index interval) {
    std::vector<Index> before(static_cast<std::size_t>(core::sequence_count(in)), 0);
    for (std::size_t n = 1; in.cu_seqlens && n < before.size(); ++n) {
        const Index tokens = core::sequence(in, static_cast<Index>(n) - 1).count;
        before[n] = before[n - 1] + (tokens + interval - 1) / interval;
    }
    return before;
}

Intermediates::Intermediates(const core::DeltaInputs& in, const core::DeltaOptions& options,
                             const core::Execution& execution)
    : wanted_(execution.stages),
      chunk_size_(execution.chunk_size),
      first_chunk_(count_intervals_before(in, execution.chunk_size)),
      has_p_(in.p) {
    const auto exists = [&](const Known& k) { return !k.of_erasing || options.rule.erases(); };
    if (options.steps > 1 && !wanted_.empty())
        throw core::InvalidArgument("stages.wanted: given, expected none where steps is " +
                                    std::to_string(options.steps));
    std::string names;
    for (const Known& k : all_known)
        if (exists(k)) names += (names.empty() ? "" : ", ") + std::string(k.name);
    for (const core::Stage& stage : wanted_) {
        const std::string label = "stage " + std::string(stage.name);
        const auto known = std::find_if(std::begin(all_known), std::end(all_known),
                                        [&](const Known& k) { return k.name == stage.name && exists(k); });
        if (known == std::end(all_known))
            throw core::InvalidArgument(label + ": unknown, expected one of " + names + " (" +
                                        std::string(options.rule.name) + ")");
        const auto expected = shape_of(known->layout, in, options, chunk_size_, count_intervals(in, chunk_size_));
        const auto sizes = stage.tensor.shape.begin();
        const std::vector<Index> actual(sizes, sizes + stage.tensor.rank);
        if (actual != expected)
            throw core::InvalidArgument(label + ": shape is " + write_shape(actual) + ", expected " +
                                        write_shape(expected));
        if (!core::is_float(stage.tensor.dtype))
            throw core::InvalidArgument(label + ": type is " + core::name_of(stage.tensor.dtype) +
                                        ", expected a floating-point type");
    }
}

const Tensor* Intermediates::find(std::string_view name) const {
    for (const core::Stage& stage : wanted_)
        if (stage.name == name) return &stage.tensor;
    return nullptr;
}

template <class T>
void Intermediates::write_rows(std::string_view name, const Place& at, const Piece& piece, const Tile<T>& x) const {
    const Tensor* t = find(name);
    if (t == nullptr) return;
    for (Index i = 0; i < x.rows(); ++i) {
        const Index token = at.sequence.begin + piece.begin + i;
        if (t->rank == 4)
            core::store_row(*t, t->offset({at.sequence.batch, token, at.hv, 0}), 3, x.cols(), x.row(i).data());
        else
            core::store(*t, t->offset({at.sequence.batch, token, at.hv}), static_cast<double>(x(i, 0)));
    }
}

template <class T>
void Intermediates::write_pairs(std::string_view name, const Place& at, const Piece& piece, const Tile<T>& x) const {
    if (!wants(name)) return;
    Tile<T> rows = Tile<T>::Zero(x.rows(), chunk_size_);
    rows.middleCols(piece.begin % chunk_size_, x.cols()) = x;
    write_rows(name, at, piece, rows);
}

template <class T>
void Intermediates::write_state(std::string_view name, const Place& at, const Piece& piece, const Tile<T>& x) const {
    const Tensor* t = find(name);
    if (t == nullptr) return;
    const Index chunk = first_chunk_[static_cast<std::size_t>(at.n)] + piece.begin / chunk_size_;
    for (Index i = 0; i < x.rows(); ++i)
        core::store_row(*t, t->offset({at.sequence.batch, chunk, at.hv, i, 0}), 4, x.cols(), x.row(i).data());
}

template <class T>
void Intermediates::report_forward(const Place& at, const Piece& piece, const Chunk<T>& c, const Folded<T>& f,
                                   const Scan<T>& x) const {
    if (wanted_.empty()) return;
    if (wants("qg")) {
        Tile<T> qg;
        decay_rows(c.q, f.read_decay, qg);
        write_rows("qg", at, piece, qg);
    }
    write_pairs("A", at, piece, x.A);
    write_pairs("L", at, piece, f.erase_score);
    write_pairs("Aqk", at, piece, f.score);
    write_rows("w", at, piece, x.w);
    write_rows("u", at, piece, x.u);
    write_rows("kg", at, piece, f.write_key);
    write_rows("v_new", at, piece, x.U);
    if (piece.begin % chunk_size_ == 0) write_state("h", at, piece, x.h);
}

template <class T>
void Intermediates::report_backward(const Place& at, const Piece& piece, const ScanGradients<T>& dx,
                                    const FoldedGradients<T>& d) const {
    if (wanted_.empty()) return;
    write_rows("dv_local", at, piece, dx.dv_local);
    write_rows("du", at, piece, dx.dU);
    write_rows("dw", at, piece, dx.dw);
    write_pairs("dA", at, piece, dx.dA);
    write_pairs("dL", at, piece, dx.dL);
    write_pairs("dL_solve", at, piece, dx.dL_solve);
    write_pairs("dAqk", at, piece, d.score);
    const Index end = piece.begin + piece.count;
    if (end % chunk_size_ == 0 || end == at.sequence.count) write_state("dh", at, piece, dx.dh);
}

template <class T>
void Intermediates::report_unfolded(const Place& at, const Piece& piece, const FoldRule<T>& rule, const Chunk<T>& c,
                                    const Folded<T>& f, const FoldedGradients<T>& d, const Unfolded<T>& u) const {
    if (wanted_.empty()) return;
    write_rows("dq_state", at, piece, u.dq_state);
    write_rows("dq_intra", at, piece, u.dq_intra);
    Tile<T> dk_state = u.dk_state, dk_intra = u.dk_intra;
    if (rule.erases && !has_p_) {
        dk_state.array() += u.e_state.array().colwise() * c.beta.array();
        dk_intra.array() += u.e_intra.array().colwise() * c.beta.array();
    }
    write_rows("dk_state", at, piece, dk_state);
    write_rows("dk_intra", at, piece, dk_intra);
    report_gate(at, piece, rule, c, f, d, u);
}

// The gate's gradient as the literature takes it: dG = q∘dq − k∘dk, dE = p∘dp, and their reverse cumulative sum. What a
// row adds up for that, channels included, is of the size dg_terms: the root of the sum of its squares.
template <class T>
void Intermediates::report_gate(const Place& at, const Piece& piece, const FoldRule<T>& rule, const Chunk<T>& c,
                                const Folded<T>& f, const FoldedGradients<T>& d, const Unfolded<T>& u) const {
    const Index channels = c.G.cols(), last = c.rows() - 1;
    Tile<T> q_dq, k_dk, p_dp = Tile<T>::Zero(c.rows(), channels), to_last, of_state;
    Tile<T> squares, squared_terms = p_dp;
    const auto multiply = [&](const auto& x, const Tile<T>& dx, Tile<T>& out) {
        multiply_for_gate(x, dx, channels, out);
        multiply_for_gate(x.cwiseAbs2(), dx.cwiseAbs2(), channels, squares);
        squared_terms += squares;
    };
    multiply(c.q, u.dq_state + u.dq_intra, q_dq);
    multiply(c.k, u.dk_state + u.dk_intra, k_dk);
    if (rule.erases) multiply(c.p, (u.e_state + u.e_intra).array().colwise() * c.beta.array(), p_dp);
    multiply_for_gate(c.k, u.dk_state, channels, to_last);
    multiply_for_gate(f.state_decay.transpose(), d.state_decay.transpose(), channels, of_state);
    Tile<T> local = q_dq - k_dk + p_dp;
    local.row(last) += to_last.colwise().sum() + of_state;
    Tile<T> difference = local;
    for (Index i = last - 1; i >= 0; --i) difference.row(i) += difference.row(i + 1);
    if (rule.before_decay) difference -= p_dp;
    write_rows("dg_q", at, piece, q_dq);
    write_rows("dg_k", at, piece, k_dk);
    write_rows("dg_p", at, piece, p_dp);
    write_rows("dg_terms", at, piece, Tile<T>(squared_terms.cwiseSqrt()));
    write_rows("dg_local", at, piece, local);
    write_rows("dg_difference", at, piece, difference);
    write_rows("dg_spans", at, piece, u.dg);
}

template void Intermediates::report_forward(const Place&, const Piece&, const Chunk<double>&, const Folded<double>&,
                                            const Scan<double>&) const;
template void Intermediates::report_forward(const Place&, const Piece&, const Chunk<float>&, const Folded<float>&,
                                            const Scan<float>&) const;
template void Intermediates::report_backward(const Place&, const Piece&, const ScanGradients<double>&,
                                             const FoldedGradients<double>&) const;
template void Intermediates::report_backward(const Place&, const Piece&, const ScanGradients<float>&,
                                             const FoldedGradients<float>&) const;
template void Intermediates::report_unfolded(const Place&, const Piece&, const FoldRule<double>&, const Chunk<double>&,
                                             const Folded<double>&, const FoldedGradients<double>&,
                                             const Unfolded<double>&) const;
template void Intermediates::report_unfolded(const Place&, const Piece&, const FoldRule<float>&, const Chunk<float>&,
                                             const Folded<float>&, const FoldedGradients<float>&,
                                             const Unfolded<float>&) const;

}  // namespace softdelta::stages::delta

void softdelta::stages::check_delta_intermediates(const core::DeltaInputs& in, const core::DeltaOptions& options,
                                                  const core::Execution& execution) {
    const delta::Intermediates checked(in, options, execution);
}
