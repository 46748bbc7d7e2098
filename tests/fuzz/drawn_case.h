// A case drawn from the fuzzer's bytes: an operation, nearly right shapes and types, options, numbers that hurt.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "io/call/operands.h"
#include "io/file/case_file.h"
#include "support/takes.h"

namespace softdelta::test {

class DrawnCase {
  public:
    DrawnCase(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    io::CaseFile draw() {
        std::vector<std::string> operations{"attention", "causal_convolution", "gated_norm"};
        for (const core::Rule& rule : core::rules) operations.emplace_back(rule.name);
        const std::string op =
            operations[static_cast<std::size_t>(below(static_cast<std::int64_t>(operations.size())))];
        file_.metadata["op"] = op;
        B_ = likely(1, 4), T_ = below(20), keys_ = likely(T_, 20), K_ = likely(2, 5), V_ = likely(K_, 5);
        H_ = likely(1, 4), HV_ = H_ * likely(2, 3);
        packed_ = one_in(4);
        if (packed_) B_ = 1;
        if (op == "causal_convolution") {
            draw_convolution();
        } else if (op == "gated_norm") {
            draw_norm();
        } else {
            op == "attention" ? draw_attention() : draw_delta(op);
            draw_options(op == "attention");
        }
        return file_;
    }

  private:
    using Shape = std::vector<std::int64_t>;

    std::int64_t below(std::int64_t n) { return at_ < size_ ? data_[at_++] % n : 0; }
    bool one_in(std::int64_t n) { return below(n) == n - 1; }
    std::int64_t likely(std::int64_t usual, std::int64_t n) { return one_in(3) ? below(n) : usual; }

    DType draw_float() {
        static constexpr DType types[] = {DType::f32, DType::bf16, DType::f16, DType::f64};
        return one_in(60) ? static_cast<DType>(below(7)) : types[below(4)];
    }

    double draw_number(DType type) {
        if (type > DType::f16) return static_cast<double>(below(type == DType::boolean ? 2 : 6));
        static constexpr double hard[] = {0,
                                          -0.0,
                                          1e-38,
                                          1e9,
                                          -1e9,
                                          -1e30,
                                          3e38,
                                          1e-45,
                                          200,
                                          std::numeric_limits<double>::infinity(),
                                          -1e10,
                                          65504,
                                          -88,
                                          -1e-7,
                                          -std::numeric_limits<double>::infinity(),
                                          std::numeric_limits<double>::quiet_NaN()};
        if (one_in(40)) return hard[below(16)];
        return static_cast<double>(below(255) - 127) / 64;
    }

    // Now and then one of another shape.
    void add(const std::string& name, Shape shape, DType type) {
        if (one_in(50)) shape[static_cast<std::size_t>(below(static_cast<std::int64_t>(shape.size())))] = below(6);
        if (one_in(100)) shape.push_back(1);
        if (one_in(100)) shape.pop_back();
        if (shape.empty()) return;
        io::OwnedTensor tensor(type, shape);
        core::Tensor view;
        view.data = tensor.data();
        view.dtype = static_cast<core::DType>(type);
        for (std::int64_t i = 0; i < tensor.count(); ++i) core::store(view, i, draw_number(type));
        file_.tensors[name] = tensor;
    }
    void add(const std::string& name, const Shape& shape) { add(name, shape, draw_float()); }
    void maybe(const std::string& name, const Shape& shape) {
        if (one_in(2)) add(name, shape);
    }
    void maybe(const std::string& name, const Shape& shape, DType type) {
        if (one_in(4)) add(name, shape, type);
    }

    void add_lengths(const std::string& name, std::int64_t rows) {
        std::vector<std::int64_t> entries{0, below(rows + 1), below(rows + 1), rows};
        std::sort(entries.begin(), entries.end());
        if (one_in(20)) entries[static_cast<std::size_t>(below(4))] = below(30) - 3;
        io::OwnedTensor tensor(DType::i64, {static_cast<std::int64_t>(entries.size())});
        std::copy(entries.begin(), entries.end(), static_cast<std::int64_t*>(tensor.data()));
        file_.tensors[name] = tensor;
    }

    Shape plane() {
        return {one_in(2) ? 1
                : packed_ ? 3
                          : B_,
                one_in(2)   ? 1
                : one_in(2) ? H_
                            : HV_,
                one_in(2) ? 1 : T_, one_in(2) ? 1 : keys_};
    }

    void draw_attention() {
        const Shape q{B_, T_, HV_, K_}, k{B_, keys_, H_, K_}, v{B_, keys_, H_, V_}, o{B_, T_, HV_, V_},
            lse{B_, HV_, T_};
        add("q", q), add("k", k), add("v", v);
        if (packed_) add_lengths("cu_seqlens_q", T_), add_lengths("cu_seqlens_k", keys_);
        maybe("mask", plane(), DType::boolean);
        if (one_in(3)) add("bias", plane());
        if (one_in(3)) add("sink", {HV_});
        maybe("cache_seqlens", {B_}, DType::i32);
        if (one_in(8)) add("block_table", {B_, below(4)}, DType::i64);
        maybe("do", o), maybe("dlse", lse), maybe("o", o), maybe("lse", lse);
        maybe("dq", q), maybe("dk", k), maybe("dv", v);
        if (file_.tensors.count("bias") != 0) maybe("dbias", file_.tensors.at("bias").shape());
        if (file_.tensors.count("sink") != 0) maybe("dsink", {HV_});
        maybe("delta", lse), maybe("ds", {packed_ ? 3 : B_, HV_, T_, keys_});
        if (one_in(4)) add("dbias_tiles", {B_, HV_, 1, keys_});
    }

    void draw_delta(const std::string& op) {
        const Shape keys{B_, T_, H_, K_}, values{B_, T_, HV_, V_}, heads{B_, T_, HV_};
        const core::Rule& rule = *io::find_operation(op)->rule;
        const Shape gate = rule.has_channel_gate() ? Shape{B_, T_, HV_, K_} : heads,
                    state{packed_ ? 3 : B_, HV_, K_, V_};
        add("q", keys), add("k", keys), add("v", values);
        if (packed_) add_lengths("cu_seqlens", T_);
        if (rule.gate != core::Gate::none) add("g", gate);
        if (takes(rule, "p")) add("p", keys);
        if (rule.erases()) maybe("beta", heads);
        if (rule.maps_by_number() && one_in(4)) file_.tensors.erase("g"), add("g_gamma", {HV_});
        maybe("initial_state", state), maybe("do", values), maybe("dfinal_state", state), maybe("o", values);
        maybe("final_state", state), maybe("dinitial_state", state), maybe("dq", keys), maybe("dv", values);
        if (file_.tensors.count("g") != 0) maybe("dg", gate);
        if (file_.tensors.count("beta") != 0) maybe("dbeta", heads);
        if (rule.gate != core::Gate::none && one_in(4)) {
            file_.metadata["use_gate_in_kernel"] = "true";
            if (one_in(3)) file_.metadata["lower_bound"] = "-5";
            add("A_log", {1, HV_});
            maybe("dt_bias", {rule.has_channel_gate() ? HV_ * K_ : HV_}), maybe("dA_log", {1, HV_});
        }
        const Shape pairs{B_, T_, HV_, 16}, rows{B_, T_, HV_, K_};
        for (const char* name : {"A", "Aqk", "dA", "L"})
            if (one_in(6)) add(name, pairs);
        for (const char* name : {"w", "qg", "dw", "dk_state"})
            if (one_in(6)) add(name, rows);
        for (const char* name : {"h", "dh"})
            if (one_in(6)) add(name, {B_, packed_ ? below(5) : (T_ + 15) / 16, HV_, K_, V_});
        if (one_in(6)) add("dg_q", gate);
    }

    void draw_convolution() {
        const std::int64_t channels = H_ * K_, width = likely(4, 9);
        const Shape x{B_, T_, channels},
            state{packed_ ? 3 : B_, channels, likely(std::max(width - 1, std::int64_t{0}), 9)};
        add("x", x), add("weight", {channels, width});
        if (packed_) add_lengths("cu_seqlens", T_);
        for (const char* name : {"bias", "dbias"}) maybe(name, {channels});
        for (const char* name : {"initial_state", "final_state", "dfinal_state", "dinitial_state"}) maybe(name, state);
        for (const char* name : {"dy", "y", "dx"}) maybe(name, x);
        maybe("dweight", {channels, width});
        draw_activation("activation");
    }

    void draw_norm() {
        const Shape x{B_, T_, HV_, V_};
        add("x", x), add("weight", {V_});
        for (const char* name : {"z", "dy", "y", "dx", "dz"}) maybe(name, x);
        maybe("dweight", {V_});
        draw_activation("gate");
        static constexpr const char* numbers[] = {"1e-6", "0", "-1", "1e300", "nan", "1e-30"};
        if (one_in(3)) file_.metadata["epsilon"] = numbers[below(6)];
    }

    void draw_activation(const char* name) {
        static constexpr const char* activations[] = {"silu", "none", "sigmoid", "relu"};
        if (one_in(2)) file_.metadata[name] = activations[below(4)];
    }

    void draw_options(bool attention) {
        static constexpr const char* numbers[] = {"0",  "1",  "-1", "0.5",  "1e300", "9223372036854775807",
                                                  "16", "64", "3",  "1e-7", "nan",   "true"};
        static constexpr const char* truths[] = {"true", "true", "false", "1"};
        const auto option = [&](const char* name, const char* value) {
            if (one_in(4)) file_.metadata[name] = value;
        };
        option("scale", numbers[below(12)]);
        file_.metadata["chunk_size"] = one_in(4) ? numbers[below(12)] : "16";
        if (attention) {
            static constexpr const char* causal[] = {"none", "top_left", "bottom_right"};
            option("causal", causal[below(3)]);
            for (const char* name : {"window_left", "window_right", "top_w", "softcap"})
                option(name, numbers[below(12)]);
            static constexpr const char* empty[] = {"minus_infinity", "plus_infinity", "zero"};
            option("empty_row", empty[below(3)]);
        } else {
            for (const char* name : {"use_qk_l2norm_in_kernel", "state_v_first", "use_beta_sigmoid_in_kernel",
                                     "allow_neg_eigval", "safe_gate"})
                option(name, truths[below(4)]);
        }
    }

    const std::uint8_t* data_;
    std::size_t size_, at_ = 0;
    std::int64_t B_ = 1, T_ = 1, keys_ = 1, H_ = 1, HV_ = 1, K_ = 1, V_ = 1;
    bool packed_ = false;
    io::CaseFile file_;
};

}  // namespace softdelta::test
