// Backward pass, one key head after the other, in waves of query rows. With D = rowsum(do∘o) − dlse:
//     blocks of rows:                      ds = p∘(do vᵀ − D),   dx = ds∘softcap',   dq = scale·dx k
//     tiles of keys, over the wave's rows:  dk += dxᵀ (scale·q),   dv += pᵀ do,   dbias += ds
// Sums over rows go through them in ascending order, and D = rowsum(p∘(do vᵀ)) needs no o.
#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "core/parallel.h"
#include "engines/reference/attention/bias_gradient.h"
#include "engines/reference/attention/rows.h"
#include "engines/reference/reference.h"
#include "engines/work.h"

namespace softdelta::reference {

namespace {

constexpr Index unit_keys = 64;

double* grow(std::vector<double>& memory, Index size) {
    if (memory.size() < static_cast<std::size_t>(size)) memory.resize(static_cast<std::size_t>(size));
    return memory.data();
}

// Consecutive rows of a key head with what sums over rows need of them.
struct Wave {
    const KeyHead* head = nullptr;
    Range rows{}, keys{};
    Matrix q{};       // [rows, D] times scale
    Matrix d_o{};     // [rows, Dv]
    Matrix p{};       // [rows, keys]
    Matrix ds{};      // [rows, keys]
    Matrix dx{};      // [rows, keys] gradient of scale·q·k; ds itself without a softcap
    double* dsink{};  // [rows]

    void place(const KeyHead& key_head, Range wave_rows) {
        const Index D = key_head.in->q.shape[3], Dv = key_head.in->v.shape[3], count = wave_rows.count();
        head = &key_head;
        rows = wave_rows;
        keys = key_head.keys(wave_rows);
        const Index stride = keys.count() / 16 * 16 + 24;  // an odd number of cache lines, so columns do not collide
        q = {grow(memory_[0], count * D), D};
        d_o = {grow(memory_[1], count * Dv), Dv};
        p = {grow(memory_[2], count * stride), stride};
        ds = {grow(memory_[3], count * stride), stride};
        dx = key_head.options->softcap != 0 ? Matrix{grow(memory_[4], count * stride), stride} : ds;
        dsink = grow(memory_[5], count);
    }

  private:
    std::array<std::vector<double>, 6> memory_;
};

// Rows [rows] of a wave's matrix, at the columns of `keys`.
Matrix part(const Wave& wave, Matrix m, Range rows, Range keys) {
    return {m.row(rows.begin - wave.rows.begin) + (keys.begin - wave.keys.begin), m.row_stride};
}

struct Scratch {
    Scratch(const core::AttentionInputs& in, Index rows, Index keys)
        : row(in, keys), dq(static_cast<std::size_t>(rows * in.q.shape[3])) {}
    RowScratch row;
    std::vector<double> dq;  // [rows, D]
};

// Row r: ds from do vᵀ in place, dx from the softcap's slope in place; returns D.
double finish_row(Index keys, const double* p, double* ds, double* dx, double dlse) {
    double D = -dlse;
    for (Index j = 0; j < keys; ++j)
        if (p[j] != 0) D += p[j] * ds[j];
    for (Index j = 0; j < keys; ++j) ds[j] = p[j] != 0 ? p[j] * (ds[j] - D) : 0;
    if (dx != ds)
        for (Index j = 0; j < keys; ++j) dx[j] = ds[j] != 0 ? ds[j] * dx[j] : 0;
    return D;
}

void clear_outside(Matrix m, Index row, Range all, Range kept) {
    std::fill(m.row(row), m.row(row) + (kept.begin - all.begin), 0.0);
    std::fill(m.row(row) + (kept.end - all.begin), m.row(row) + all.count(), 0.0);
}

void compute_rows(const Wave& wave, Range rows, const core::AttentionGradients& grad, Scratch& scratch) {
    const KeyHead& head = *wave.head;
    const core::AttentionInputs& in = *head.in;
    const Range keys = head.keys(rows);
    const Index count = rows.count(), first = rows.begin - wave.rows.begin;
    const Matrix q{wave.q.row(first), wave.q.row_stride}, d_o{wave.d_o.row(first), wave.d_o.row_stride};
    const Matrix p = part(wave, wave.p, rows, keys), ds = part(wave, wave.ds, rows, keys);
    const Matrix dx = part(wave, wave.dx, rows, keys);

    for (Index i = first; i < first + count; ++i)
        for (const Matrix& m : {wave.p, wave.ds, wave.dx}) clear_outside(m, i, wave.keys, keys);
    load_queries(head, in.q, rows, head.options->scale, q);
    load_queries(head, grad.d_o, rows, 1, d_o);
    dot_keys(head, in.k, keys, count, q, p, scratch.row);
    dot_keys(head, in.v, keys, count, d_o, ds, scratch.row);
    for (Index i = 0; i < count; ++i) {
        const Index r = rows.begin + i;
        const Softmax softmax = softmax_row(head, r, keys, p.row(i), dx.row(i), scratch.row);
        const double dlse = grad.dlse ? core::load(grad.dlse, head.lse_offset(grad.dlse, r)) : 0;
        const double D = finish_row(keys.count(), p.row(i), ds.row(i), dx.row(i), dlse);
        wave.dsink[first + i] = softmax.sink != 0 ? -softmax.sink * D : 0;
    }
    if (!grad.dq) return;
    const Matrix dq{scratch.dq.data(), in.q.shape[3]};
    sum_keys(head, in.k, keys, count, dx, dq, scratch.row);
    for (Index i = 0; i < count; ++i) {
        for (Index c = 0; c < in.q.shape[3]; ++c) dq.row(i)[c] *= head.options->scale;
        core::store_row(grad.dq, head.query_offset(grad.dq, rows.begin + i), 3, in.q.shape[3], dq.row(i));
    }
}

// Sums over the rows of one key head.
struct KeySums {
    void clear(const KeyHead& head) {
        const Index D = head.in->k.shape[3], Dv = head.in->v.shape[3], keys = head.sequence.k_count;
        dk_.assign(static_cast<std::size_t>(keys * D), 0.0);
        dv_.assign(static_cast<std::size_t>(keys * Dv), 0.0);
        dk = {dk_.data(), D};
        dv = {dv_.data(), Dv};
    }
    Matrix dk{};  // [Lk, D]
    Matrix dv{};  // [Lk, Dv]

  private:
    std::vector<double> dk_, dv_;
};

void add_tile(const Wave& wave, Range tile, const core::AttentionGradients& grad, const KeySums& sums) {
    const Index rows = wave.rows.count(), keys = tile.count();
    const auto weights = [&](Matrix m) { return part(wave, m, wave.rows, tile).transposed(); };
    const auto from = [&](Matrix m) { return Matrix{m.row(tile.begin), m.row_stride}; };
    if (grad.dk) add_product(Terms::weighted, keys, rows, wave.q.row_stride, weights(wave.dx), wave.q, from(sums.dk));
    if (grad.dv)
        add_product(Terms::weighted, keys, rows, wave.d_o.row_stride, weights(wave.p), wave.d_o, from(sums.dv));
}

void store_keys(const KeyHead& head, const core::Tensor& t, Matrix rows) {
    for (Index j = 0; t && j < head.sequence.k_count; ++j)
        core::store_row(t, core::key_offset(*head.in, t, head.sequence, head.key_head, j), 3, t.shape[3], rows.row(j));
}

void fill_zero(const core::Tensor& t) {
    const std::vector<double> zeros(static_cast<std::size_t>(t ? t.shape[3] : 0));
    for (Index a = 0; t && a < t.shape[0]; ++a)
        for (Index b = 0; b < t.shape[1]; ++b)
            for (Index c = 0; c < t.shape[2]; ++c)
                core::store_row(t, t.offset({a, b, c, 0}), 3, t.shape[3], zeros.data());
}

void run_wave(const Wave& wave, int allowed, const core::AttentionGradients& grad, const KeySums& sums,
              std::optional<BiasGradient>& bias) {
    constexpr Index most_block_rows = 64, least_block_rows = 16, blocks_wanted = 8;
    const auto units = [](Index size, Index step) { return (size + step - 1) / step; };
    const auto unit_of = [](Range all, Index step, Index unit) {
        const Index begin = all.begin + unit * step;
        return Range{begin, std::min(begin + step, all.end)};
    };
    const KeyHead& head = *wave.head;
    const double scores = static_cast<double>(wave.rows.count()) * static_cast<double>(wave.keys.count());
    const int threads =
        core::useful_threads(allowed, engines::score_work(*head.in, scores, engines::Direction::backward));
    const Index block = std::clamp(units(wave.rows.count(), blocks_wanted), least_block_rows, most_block_rows);
    core::parallel_units(threads, units(wave.rows.count(), block), [&] {
        return [&, scratch = Scratch(*head.in, block, wave.keys.count())](Index unit) mutable {
            compute_rows(wave, unit_of(wave.rows, block, unit), grad, scratch);
        };
    });
    core::parallel_units(threads, units(wave.keys.count(), unit_keys), [&] {
        return [&](Index unit) {
            const Range tile = unit_of(wave.keys, unit_keys, unit);
            add_tile(wave, tile, grad, sums);
            if (bias && !bias->keys_shared()) bias->add(head, wave.rows, tile, part(wave, wave.ds, wave.rows, tile));
        };
    });
    if (bias && bias->keys_shared()) bias->add(head, wave.rows, wave.keys, wave.ds);
}

Index wave_rows(const KeyHead& head) {
    constexpr Index most_rows = 1024, least_rows = 4, most_scores = Index{1} << 22;
    return std::clamp(most_scores / std::max<Index>(head.sequence.k_count, 1), least_rows, most_rows);
}

}  // namespace

void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad) {
    std::vector<KeyHead> heads = key_heads(in, options, execution.float_scores);
    if (grad.dbias && grad.dbias.shape[0] == 1)  // sequences share slices of bias
        std::stable_sort(heads.begin(), heads.end(),
                         [](const KeyHead& a, const KeyHead& b) { return a.key_head < b.key_head; });
    for (const core::Tensor& t : {grad.dk, grad.dv, grad.dbias}) fill_zero(t);  // rows that no sequence has

    Wave wave;
    KeySums sums;
    std::optional<BiasGradient> bias;
    if (grad.dbias) bias.emplace(in, grad.dbias);
    std::vector<double> dsink(static_cast<std::size_t>(in.q.shape[2]));
    for (const KeyHead& head : heads) {
        sums.clear(head);
        if (bias) bias->select(head);
        for (Index begin = 0; begin < head.rows(); begin += wave_rows(head)) {
            wave.place(head, {begin, std::min(begin + wave_rows(head), head.rows())});
            run_wave(wave, execution.threads, grad, sums, bias);
            for (Index r = wave.rows.begin; r < wave.rows.end; ++r)
                dsink[static_cast<std::size_t>(head.head(r))] += wave.dsink[r - wave.rows.begin];
        }
        store_keys(head, grad.dk, sums.dk);
        store_keys(head, grad.dv, sums.dv);
    }
    if (bias) bias->finish();
    if (grad.dsink) core::store_row(grad.dsink, 0, 0, in.q.shape[2], dsink.data());
}

}  // namespace softdelta::reference
