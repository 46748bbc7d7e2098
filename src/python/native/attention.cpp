// softdelta._native: attention. Arguments stand in the order of softdelta.h; the package gives them defaults. With
// heads_first q, k, v, o and their gradients are [B, H, L, D].
#include "python/native/call.h"

namespace softdelta::python {

using namespace nb::literals;

namespace {

softdelta_attention_inputs inputs(Views& views, nb::handle q, nb::handle k, nb::handle v, nb::handle mask,
                                  nb::handle bias, nb::handle sink, nb::handle cu_seqlens_q, nb::handle cu_seqlens_k,
                                  nb::handle cache_seqlens, nb::handle block_table, bool heads_first) {
    return {sizeof(softdelta_attention_inputs),
            views.input("q", q, heads_first),
            views.input("k", k, heads_first),
            views.input("v", v, heads_first),
            views.input("mask", mask),
            views.input("bias", bias),
            views.input("sink", sink),
            views.input("cu_seqlens_q", cu_seqlens_q),
            views.input("cu_seqlens_k", cu_seqlens_k),
            views.input("cache_seqlens", cache_seqlens),
            views.input("block_table", block_table)};
}

void forward(nb::handle q, nb::handle k, nb::handle v, nb::handle mask, nb::handle bias, nb::handle sink,
             nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle cache_seqlens, nb::handle block_table,
             double scale, int causal, std::int64_t window_left, std::int64_t window_right, double softcap,
             int empty_row, std::int64_t top_w, nb::handle o, nb::handle lse, const char* engine, int threads,
             bool bf16, bool heads_first) {
    Views views(bf16);
    const auto in =
        inputs(views, q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, heads_first);
    const softdelta_attention_options options{sizeof options, scale,   causal,    window_left,
                                              window_right,   softcap, empty_row, top_w};
    const softdelta_attention_outputs out{sizeof out, views.result("o", o, heads_first), views.result("lse", lse)};
    const softdelta_execution execution = How{engine, threads, bf16}.execution();
    run([&] { return softdelta_attention_forward(&in, &options, &execution, &out); });
}

void backward(nb::handle q, nb::handle k, nb::handle v, nb::handle mask, nb::handle bias, nb::handle sink,
              nb::handle cu_seqlens_q, nb::handle cu_seqlens_k, nb::handle cache_seqlens, nb::handle block_table,
              double scale, int causal, std::int64_t window_left, std::int64_t window_right, double softcap,
              int empty_row, std::int64_t top_w, nb::handle o, nb::handle lse, nb::handle d_o, nb::handle dlse,
              nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dbias, nb::handle dsink, const char* engine,
              int threads, bool bf16, bool heads_first) {
    Views views(bf16);
    const auto in =
        inputs(views, q, k, v, mask, bias, sink, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, heads_first);
    const softdelta_attention_options options{sizeof options, scale,   causal,    window_left,
                                              window_right,   softcap, empty_row, top_w};
    const softdelta_attention_gradients gradients{sizeof gradients,
                                                  views.input("o", o, heads_first),
                                                  views.input("lse", lse),
                                                  views.input("d_o", d_o, heads_first),
                                                  views.input("dlse", dlse),
                                                  views.result("dq", dq, heads_first),
                                                  views.result("dk", dk, heads_first),
                                                  views.result("dv", dv, heads_first),
                                                  views.result("dbias", dbias),
                                                  views.result("dsink", dsink)};
    const softdelta_execution execution = How{engine, threads, bf16}.execution();
    run([&] { return softdelta_attention_backward(&in, &options, &execution, &gradients); });
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attention_forward", &forward, "q"_a.none(), "k"_a.none(), "v"_a.none(), "mask"_a.none(), "bias"_a.none(),
          "sink"_a.none(), "cu_seqlens_q"_a.none(), "cu_seqlens_k"_a.none(), "cache_seqlens"_a.none(),
          "block_table"_a.none(), "scale"_a, "causal"_a, "window_left"_a, "window_right"_a, "softcap"_a, "empty_row"_a,
          "top_w"_a, "o"_a.none(), "lse"_a.none(), "engine"_a, "threads"_a, "bf16"_a, "heads_first"_a = false);
    m.def("attention_backward", &backward, "q"_a.none(), "k"_a.none(), "v"_a.none(), "mask"_a.none(), "bias"_a.none(),
          "sink"_a.none(), "cu_seqlens_q"_a.none(), "cu_seqlens_k"_a.none(), "cache_seqlens"_a.none(),
          "block_table"_a.none(), "scale"_a, "causal"_a, "window_left"_a, "window_right"_a, "softcap"_a, "empty_row"_a,
          "top_w"_a, "o"_a.none(), "lse"_a.none(), "d_o"_a.none(), "dlse"_a.none(), "dq"_a.none(), "dk"_a.none(),
          "dv"_a.none(), "dbias"_a.none(), "dsink"_a.none(), "engine"_a, "threads"_a, "bf16"_a,
          "heads_first"_a = false);
}

}  // namespace softdelta::python
