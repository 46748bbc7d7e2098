// Attention backward: p is formed again from lse, tile by tile. A unit of work is a key head of a sequence with all
// query heads of its group, so that dk and dv are summed in place.
#include <algorithm>
#include <cmath>

#include "core/execution.h"
#include "core/parallel.h"
#include "engines/stages/attention/bias_gradient.h"
#include "engines/stages/attention/head.h"
#include "engines/stages/attention/intermediates.h"
#include "engines/stages/attention/rounding.h"
#include "engines/stages/stages.h"
#include "engines/work.h"

namespace softdelta::stages {

namespace attention {

namespace {

// What the workers of a call share.
template <class T>
struct Backward {
    const core::AttentionInputs& in;
    const core::AttentionOptions& options;
    const core::Execution& execution;
    const core::AttentionGradients& grad;
    Intermediates stages;
    BiasGradient<T> bias;
    Buffer<T> dsink;  // [N, H] of each sequence

    bool needs_scores() const { return grad.dq || grad.dk || grad.dv || grad.dbias || stages.ds || stages.dbias_tiles; }
};

template <class T>
class BackwardWorker {
  public:
    explicit BackwardWorker(Backward<T>& call)
        : call_(call), in_(call.in), grad_(call.grad), head_(call.in, call.options, call.execution) {}

    void operator()(Index accumulator) {
        accumulator_ = accumulator;
        call_.bias.begin(accumulator);
        for (const Unit& unit : call_.bias.units(accumulator)) differentiate(unit);
        call_.bias.finish(accumulator);
    }

  private:
    void differentiate(const Unit& unit);
    void differentiate_head(Index sequence, Index h);

    bool load_output();
    void compute_delta();
    T sink_gradient();
    void compute_ds();
    void add_products(Rounding& rounding);

    void store_rows();
    void store_tile();
    void store_dq(Rounding& rounding);
    void store_keys(const Unit& unit);

    // Rows of dk and dv that belong to a unit: also keys of a cache that are not in use, whose gradient is 0.
    Index key_rows_of(const Unit& unit) const {
        return in_.cu_seqlens_k ? core::sequence(in_, unit.sequence).k_count : in_.k.shape[1];
    }
    Tile<T> per_row(Buffer<T>& buffer) { return tile_in(buffer, head_.query_count(), 1); }
    Tile<T> per_value(Buffer<T>& buffer) { return tile_in(buffer, head_.query_count(), in_.v.shape[3]); }
    Tile<T> dq() { return tile_in(dq_, head_.query_count(), in_.q.shape[3]); }
    Tile<T> ds() { return tile_in(ds_, head_.query_count(), head_.key_count()); }
    Tile<T> key_rows(Buffer<T>& buffer, Index size) {
        return {buffer.data() + head_.key_begin() * size, head_.key_count(), size};
    }

    Backward<T>& call_;
    const core::AttentionInputs& in_;
    const core::AttentionGradients& grad_;
    Head<T> head_;
    Index accumulator_ = 0;
    Buffer<T> o_, do_, dq_;         // [rows, Dv], [rows, Dv], [rows, D] of the current queries
    Buffer<T> lse_, dlse_, delta_;  // [rows]
    Buffer<T> column_sum_;          // [keys]
    Buffer<T> ds_;                  // [rows, keys] of the current tile; p is in the head's s
    Buffer<T> dk_, dv_;             // [Lk, D], [Lk, Dv] of the current key head
};

template <class T>
void BackwardWorker<T>::differentiate(const Unit& unit) {
    const Index group = in_.q.shape[2] / in_.k.shape[2];
    if (grad_.dk) tile_in(dk_, key_rows_of(unit), in_.k.shape[3]).setZero();
    if (grad_.dv) tile_in(dv_, key_rows_of(unit), in_.v.shape[3]).setZero();
    for (Index h = unit.key_head * group; h < (unit.key_head + 1) * group; ++h) differentiate_head(unit.sequence, h);
    store_keys(unit);
}

template <class T>
void BackwardWorker<T>::differentiate_head(Index sequence, Index h) {
    const Index unit = sequence * in_.q.shape[2] + h;
    Rounding forward_rounding = make_rounding<T>(in_, call_.execution, RoundedPass::forward, unit);
    Rounding rounding = make_rounding<T>(in_, call_.execution, RoundedPass::scores, unit);
    T& dsink = call_.dsink[static_cast<std::size_t>(unit)];
    head_.enter(sequence, h);
    const core::AttentionSequence& s = head_.sequence();
    for (Index i = 0; i < s.q_count; i += head_.chunk_size()) {
        head_.enter_queries(i);
        if (!load_output()) {
            head_.attend(forward_rounding, in_.q.dtype, core::DType::f32, per_value(o_), per_row(lse_));
        }
        compute_delta();
        store_rows();
        if (in_.sink) dsink += sink_gradient();
        if (!call_.needs_scores()) continue;
        dq().setZero();
        for (Index j = 0; j < s.k_count; j += head_.chunk_size()) {
            if (!head_.load_tile(j)) continue;
            compute_ds();
            store_tile();
            call_.bias.add(accumulator_, h, i, j, ds());
            add_products(rounding);
        }
        if (grad_.dq) store_dq(rounding);
    }
}

// o and lse as the caller's forward pass left them; false where they do not tell what is needed.
template <class T>
bool BackwardWorker<T>::load_output() {
    if (!grad_.o || !grad_.lse) return false;
    head_.load_rows(grad_.o, per_value(o_));
    Tile<T> lse = per_row(lse_);
    head_.load_numbers(grad_.lse, lse);
    for (Index i = 0; i < lse.rows(); ++i) {
        if (!head_.keeps_probabilities(lse(i, 0))) return false;
        head_.use_lse(i, lse(i, 0));
        if (std::isinf(head_.log_sum()(i, 0))) lse(i, 0) = head_.log_sum()(i, 0);
    }
    return true;
}

// delta = rowsum(do∘o) − dlse
template <class T>
void BackwardWorker<T>::compute_delta() {
    Tile<T> d_o = per_value(do_), o = per_value(o_), delta = per_row(delta_);
    head_.load_rows(grad_.d_o, d_o);
    for (Index i = 0; i < delta.rows(); ++i) delta(i, 0) = d_o.row(i).cwiseProduct(o.row(i)).sum();
    if (!grad_.dlse) return;
    Tile<T> dlse = per_row(dlse_);
    head_.load_numbers(grad_.dlse, dlse);
    delta -= dlse;
}

// −Σ e^(sink − lse)·delta over the current queries. A row of lse = +∞ is the sink's, if there is one.
template <class T>
T BackwardWorker<T>::sink_gradient() {
    constexpr T infinity = std::numeric_limits<T>::infinity();
    const T sink = static_cast<T>(core::load(in_.sink, in_.sink.offset({head_.index()}))) * head_.per_score();
    const Tile<T> subtrahend = head_.subtrahend(), log_sum = head_.log_sum(), delta = per_row(delta_);
    if (sink == -infinity) return 0;
    T sum = 0;
    for (Index i = 0; i < delta.rows(); ++i) {
        const bool all = log_sum(i, 0) == infinity;
        sum -=
            (all ? T(1) : std::exp(std::min((sink - subtrahend(i, 0)) - log_sum(i, 0), T(0)) * head_.per_exponent())) *
            delta(i, 0);
    }
    return sum;
}

// p = e^(s − lse) into the head's s, and ds = p∘(do vᵀ − delta). Where p is 0, so is ds, whatever stands there.
template <class T>
void BackwardWorker<T>::compute_ds() {
    head_.compute_scores();
    Tile<T> p = head_.s(), d_s = ds();
    const Tile<T> subtrahend = head_.subtrahend(), log_sum = head_.log_sum(), delta = per_row(delta_);
    multiply_bt(1, per_value(do_), head_.v(), d_s);  // [rows, Dv] · [keys, Dv]ᵀ
    for (Index i = 0; i < p.rows(); ++i) {
        auto row = p.row(i).array();
        auto d_row = d_s.row(i).array();
        row = ((row - subtrahend(i, 0)) - log_sum(i, 0)) * head_.per_exponent();
        exponentiate(row);
        d_row = (row == T(0)).select(T(0), row * (d_row - delta(i, 0)));
    }
}

// dv += pᵀ do, dq += ds' k, dk += ds'ᵀ q, with ds' = ds times the slope of the softcap. Scale comes when they are
// stored.
template <class T>
void BackwardWorker<T>::add_products(Rounding& rounding) {
    Tile<T> p = head_.s(), d_s = ds();
    if (grad_.dv) {
        rounding.operand(p.data(), p.size());
        add_product_at(1, p, per_value(do_), key_rows(dv_, in_.v.shape[3]));
    }
    if (!grad_.dq && !grad_.dk) return;
    if (call_.options.softcap > 0)
        d_s.array() = (d_s.array() == T(0)).select(T(0), d_s.array() * head_.slope().array());
    rounding.operand(d_s.data(), d_s.size());
    if (grad_.dq) add_product(1, d_s, head_.k(), dq());
    if (grad_.dk) add_product_at(1, d_s, head_.q(), key_rows(dk_, in_.k.shape[3]));
}

template <class T>
void BackwardWorker<T>::store_rows() {
    if (call_.stages.lse) head_.store_lse(call_.stages.lse, per_row(lse_));
    if (call_.stages.delta) head_.store_numbers(call_.stages.delta, per_row(delta_));
}

template <class T>
void BackwardWorker<T>::store_tile() {
    const Tile<T> d_s = ds();
    const Index n = head_.sequence().mask_batch, h = head_.index(), i = head_.query_begin(), j = head_.key_begin();
    if (const Tensor& t = call_.stages.ds)
        for (Index r = 0; r < d_s.rows(); ++r)
            core::store_row(t, t.offset({n, h, i + r, j}), 3, d_s.cols(), d_s.row(r).data());
    if (const Tensor& t = call_.stages.dbias_tiles) {
        Tile<T> sum = tile_in(column_sum_, 1, d_s.cols());
        sum = static_cast<T>(core::bias_slope(in_, h)) * d_s.colwise().sum();
        core::store_row(t, t.offset({n, h, i / head_.chunk_size(), j}), 3, sum.cols(), sum.data());
    }
}

template <class T>
void BackwardWorker<T>::store_dq(Rounding& rounding) {
    Tile<T> rows = dq();
    rows *= static_cast<T>(call_.options.scale);
    rounding.stored(rows.data(), rows.size(), grad_.dq.dtype);
    head_.store_rows(grad_.dq, rows);
}

template <class T>
void BackwardWorker<T>::store_keys(const Unit& unit) {
    const core::AttentionSequence s = core::sequence(in_, unit.sequence);
    const Index rows = key_rows_of(unit);
    Rounding rounding =
        make_rounding<T>(in_, call_.execution, RoundedPass::keys, unit.sequence * in_.k.shape[2] + unit.key_head);
    const auto store = [&](const Tensor& t, Buffer<T>& buffer) {
        Tile<T> all = tile_in(buffer, rows, t.shape[3]);
        rounding.stored(all.data(), all.size(), t.dtype);
        for (Index j = 0; j < rows; ++j)
            core::store_row(t, t.offset({s.key_batch, s.k_begin + j, unit.key_head, 0}), 3, all.cols(),
                            all.row(j).data());
    };
    if (grad_.dk) {
        tile_in(dk_, rows, in_.k.shape[3]) *= static_cast<T>(call_.options.scale);
        store(grad_.dk, dk_);
    }
    if (grad_.dv) store(grad_.dv, dv_);
}

// Tiles that nobody looks at are not written later.
void fill_with_zeros(const Tensor& t) {
    for (Index a = 0; a < t.shape[0]; ++a)
        for (Index b = 0; b < t.shape[1]; ++b)
            for (Index c = 0; c < t.shape[2]; ++c)
                for (Index d = 0; d < t.shape[3]; ++d) core::store(t, t.offset({a, b, c, d}), 0);
}

// dsink [H] = Σ over sequences of what each contributes, dsink [N, H]
template <class T>
void store_sink_gradient(const Backward<T>& call) {
    const Tensor& t = call.grad.dsink;
    for (Index h = 0; h < t.shape[0]; ++h) {
        T sum = 0;
        for (std::size_t at = static_cast<std::size_t>(h); at < call.dsink.size();
             at += static_cast<std::size_t>(t.shape[0]))
            sum += call.dsink[at];
        make_rounding<T>(call.in, call.execution, RoundedPass::sink, h).stored(&sum, 1, t.dtype);
        core::store(t, t.offset({h}), static_cast<double>(sum));
    }
}

}  // namespace

}  // namespace attention

template <class T>
void attention_backward(const core::AttentionInputs& in, const core::AttentionOptions& options,
                        const core::Execution& execution, const core::AttentionGradients& grad) {
    using namespace attention;
    Backward<T> call{in, options, execution, grad, find_intermediates(in, execution), {in, execution, grad.dbias}, {}};
    call.dsink.assign(static_cast<std::size_t>(core::sequence_count(in) * in.q.shape[2]), T(0));
    for (const Tensor& t : {call.stages.ds, call.stages.dbias_tiles})
        if (t) fill_with_zeros(t);
    const core::Work work = engines::work_of(in, options, engines::Direction::backward);
    core::parallel_units(core::useful_threads(execution.threads, work), call.bias.accumulator_count(),
                         [&] { return BackwardWorker<T>(call); });
    call.bias.store_shared_slices();
    if (grad.dsink) store_sink_gradient(call);
}

template void attention_backward<double>(const core::AttentionInputs&, const core::AttentionOptions&,
                                         const core::Execution&, const core::AttentionGradients&);
template void attention_backward<float>(const core::AttentionInputs&, const core::AttentionOptions&,
                                        const core::Execution&, const core::AttentionGradients&);

}  // namespace softdelta::stages
