#include "support/random_layer.h"

#include <algorithm>
#include <limits>

#include "core/dtype.h"
#include "core/tensor.h"

namespace softdelta::test {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Draws of one call.
class Draw {
  public:
    Draw(std::uint64_t seed, const LayerRanges& ranges)
        : ranges_(ranges), random_(seed), repeat_random_(seed + 0x4e9ea7) {}

    Index number(Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random_); }
    bool one_of(Index n) { return number(0, n - 1) == 0; }
    Random& random() { return random_; }

    // Normal numbers; dense, or in any layout.
    Array floats(const Shape& shape, bool one_type = false) {
        const DType dtype =
            one_type ? ranges_.dtypes[0] : ranges_.dtypes[static_cast<std::size_t>(number(0, types() - 1))];
        Array array = one_of(2) ? Array(dtype, shape) : Array(dtype, shape, random_);
        fill_normal(array, random_);
        if (ranges_.repeats && repeat_random_() % 6 == 0) repeat_some(array, shape.size(), repeat_random_);
        return array;
    }
    Array indices(const Numbers& values) {
        Array array(one_of(2) ? DType::i32 : DType::i64, {static_cast<Index>(values.size())});
        for (std::size_t i = 0; i < values.size(); ++i) array.set(static_cast<Index>(i), values[i]);
        return array;
    }
    // Some of these, one at least.
    std::vector<std::string> some(const std::vector<std::string>& all) {
        std::vector<std::string> names;
        for (const std::string& name : all)
            if (!one_of(4)) names.push_back(name);
        if (names.empty())
            names.push_back(all[static_cast<std::size_t>(number(0, static_cast<Index>(all.size()) - 1))]);
        return names;
    }
    void make_nonfinite(const Array& array) {
        constexpr double values[] = {infinity, -infinity, std::numeric_limits<double>::quiet_NaN()};
        for (Index i = 0; array.count() > 0 && i < 3; ++i)
            array.set(number(0, array.count() - 1), values[number(0, 2)]);
    }

  private:
    Index types() const { return static_cast<Index>(ranges_.dtypes.size()); }
    const LayerRanges& ranges_;
    Random random_, repeat_random_;  // strides of zero have a stream of their own
};

// Rows of any magnitude, from a stream of their own.
void draw_row_sizes(std::uint64_t seed, Index columns, const Array& rows) {
    if (rows.view().dtype() == DType::f16) return;
    Random random(seed + 0x512e5);
    const std::vector<double> before = rows.values();  // rows may be one in memory
    for (Index row = 0; row < rows.count() / columns; ++row) {
        constexpr double sizes[] = {1, 1e10, 1e19, 1e25, 5e37, 1e-15, 1e-30, 1e-40};
        const double size = sizes[random() % std::size(sizes)];
        for (Index c = 0; c < columns; ++c)
            rows.set(row * columns + c, before[static_cast<std::size_t>(row * columns + c)] * size);
    }
}

// [N+1] where sequences begin; some are empty.
Numbers draw_bounds(Draw& draw, Index tokens) {
    Numbers at{0};
    for (Index n = draw.number(0, 4); n > 0; --n) at.push_back(static_cast<double>(draw.number(0, tokens)));
    if (tokens > 0 || at.size() > 1) at.push_back(static_cast<double>(tokens));
    std::sort(at.begin(), at.end());
    if (at.size() > 2 && draw.one_of(2)) at[1] = at[2];
    return at;
}

Array absolute(const Array& a, double factor = 1) {
    const Tensor& t = a.view();
    Array copy(DType::f64, {t.shape().begin(), t.shape().end()});
    for (Index i = 0; i < a.count(); ++i) copy.set(i, factor * std::abs(a.get(i)));
    return copy;
}

Array integers(const Array& a) {
    Array copy(DType::i64, {a.count()});
    for (Index i = 0; i < a.count(); ++i) copy.set(i, a.get(i));
    return copy;
}

}  // namespace

Numbers numbers_of(const Tensor& t) {
    core::Tensor c{t.data(), static_cast<core::DType>(t.dtype()), static_cast<int>(t.rank()), {}, {}};
    std::copy(t.shape().begin(), t.shape().end(), c.shape.begin());
    std::copy(t.stride().begin(), t.stride().end(), c.stride.begin());
    Numbers numbers(static_cast<std::size_t>(t.count()));
    for (Index element = 0; element < t.count(); ++element) {
        Index offset = 0, rest = element;
        for (std::size_t dim = t.rank(); dim-- > 0; rest /= t.shape(dim))
            offset += rest % t.shape(dim) * t.stride()[dim];
        numbers[static_cast<std::size_t>(element)] = core::load(c, offset);
    }
    return numbers;
}

LayerCall<Convolution> draw_convolution(std::uint64_t seed, const LayerRanges& ranges) {
    Draw draw(seed, ranges);
    LayerCall<Convolution> call;
    call.seed = seed;
    const bool packed = draw.one_of(3), silu = draw.one_of(2);
    const Index B = packed ? 1 : draw.number(seed % 23 == 0 ? 0 : 1, 3);
    const Index T = draw.one_of(6) ? draw.number(0, 1) : draw.number(2, ranges.tokens);
    const Index C = draw.number(1, ranges.channels), W = draw.number(1, 8), S = W - 1 + draw.number(0, 2);
    call.options.activation = silu ? Activation::silu : Activation::none;
    call.given["x"] = draw.floats({B, T, C});
    if (ranges.nonfinite && draw.one_of(3)) draw.make_nonfinite(call.given["x"]), call.features += ", not finite";
    call.given["weight"] = draw.floats({C, W});
    if (draw.one_of(2)) call.given["bias"] = draw.floats({C});
    Index N = B;
    if (packed) {
        const Numbers bounds = draw_bounds(draw, T);
        N = static_cast<Index>(bounds.size()) - 1;
        call.given["cu_seqlens"] = draw.indices(bounds);
    }
    call.state_shape = {N, C, S};
    if (draw.one_of(2)) call.given["initial_state"] = draw.floats(call.state_shape);
    if (ranges.pools && !call.has("initial_state") && draw.one_of(3)) {
        Numbers entries(static_cast<std::size_t>(N));
        for (std::size_t n = 0; n < entries.size(); ++n) entries[n] = draw.one_of(4) ? -1 : static_cast<double>(n);
        std::shuffle(entries.begin(), entries.end(), draw.random());
        call.given["state_indices"] = draw.indices(entries);
        call.features += ", pool";
    }
    if (!draw.one_of(8)) call.given["dy"] = draw.floats({B, T, C});
    if (!call.has("dy") || draw.one_of(2)) call.given["dfinal_state"] = draw.floats(call.state_shape);
    call.outputs = draw.some({"y", "final_state"});
    if (call.has("state_indices")) call.outputs = {"y"};
    std::vector<std::string> wanted{"dx", "dweight", "dinitial_state"};
    if (call.has("bias")) wanted.emplace_back("dbias");
    call.wanted = draw.some(wanted);
    call.features += std::string(silu ? ", silu" : "") + (packed ? ", packed" : "") + ", B " + std::to_string(B) +
                     " T " + std::to_string(T) + " C " + std::to_string(C) + " W " + std::to_string(W) + " S " +
                     std::to_string(S);
    return call;
}

LayerCall<Norm> draw_norm(std::uint64_t seed, const LayerRanges& ranges) {
    Draw draw(seed, ranges);
    LayerCall<Norm> call;
    call.seed = seed;
    const Index B = draw.number(seed % 23 == 0 ? 0 : 1, 3), T = draw.one_of(8) ? 0 : draw.number(1, ranges.tokens),
                H = draw.number(1, 4), D = draw.number(1, ranges.channels);
    const Shape shape{B, T, H, D};
    call.options.gate = static_cast<Activation>(draw.number(0, 2));
    call.options.epsilon = draw.one_of(2) ? 1e-6 : 0.3;
    call.given["x"] = draw.floats(shape);
    if (ranges.nonfinite && draw.one_of(3)) draw.make_nonfinite(call.given["x"]), call.features += ", not finite";
    if (ranges.row_sizes && seed % 3 == 0) draw_row_sizes(seed, D, call.given["x"]), call.features += ", row sizes";
    if (call.options.gate != Activation::none) call.given["z"] = draw.floats(shape);
    if (!draw.one_of(4)) call.given["weight"] = draw.floats({D});
    call.given["dy"] = draw.floats(shape);
    call.outputs = {"y"};
    std::vector<std::string> wanted{"dx"};
    if (call.has("z")) wanted.emplace_back("dz");
    if (call.has("weight")) wanted.emplace_back("dweight");
    call.wanted = draw.some(wanted);
    call.features += ", gate " + std::to_string(static_cast<int>(call.options.gate)) + ", B " + std::to_string(B) +
                     " T " + std::to_string(T) + " H " + std::to_string(H) + " D " + std::to_string(D);
    return call;
}

LayerRanges fast_layer_ranges(std::uint64_t seed) {
    const std::vector<DType> types[] = {
        {DType::f32}, {DType::bf16}, {DType::f16}, {DType::f32, DType::bf16, DType::f16}};
    LayerRanges ranges{
        .tokens = 30, .channels = 70, .pools = true, .nonfinite = true, .row_sizes = true, .repeats = true};
    if (seed % 5 == 1) ranges.tokens = 700, ranges.channels = 20;
    if (seed % 5 == 2) ranges.tokens = 6, ranges.channels = 1100;
    ranges.dtypes = types[seed / 5 % 4];
    return ranges;
}

// With absolute values the sums are the sizes of what is rounded. Σ|w||x| is also what the slope of an activation sees.
NumbersByName bounds(const LayerCall<Convolution>& call, const std::vector<std::string>& names, bool backward) {
    LayerCall<Convolution> sizes;
    sizes.state_shape = call.state_shape;
    for (const auto& [name, array] : call.given)
        sizes.given[name] = name == "cu_seqlens" || name == "state_indices" ? integers(array) : absolute(array);
    if (!backward) return truth(sizes, names, false);
    const Numbers z = truth(sizes, {"y"}, false).at("y");
    if (call.options.activation != Activation::none && call.has("dy"))
        for (std::size_t i = 0; i < z.size(); ++i)
            sizes.given["dy"].set(static_cast<Index>(i), sizes["dy"].get(static_cast<Index>(i)) * (2 + z[i]));
    return truth(sizes, names, true);
}

NumbersByName bounds(const LayerCall<Norm>& call, const std::vector<std::string>& names, bool backward) {
    const Numbers x = call["x"].values(), dy = call["dy"].values();
    const Index D = call["x"].view().shape(3);
    const auto rows = static_cast<Index>(x.size()) / D;
    NumbersByName all;
    for (const std::string& name : names) {
        all[name].assign(name == "dweight" ? static_cast<std::size_t>(D) : x.size(), 0);
    }
    const auto at = [&](const char* name, Index i) { return call.has(name) ? std::abs(call[name].get(i)) : 1.0; };
    for (Index row = 0; row < rows; ++row) {
        double squares = 0, product = 0;
        for (Index d = 0; d < D; ++d)
            squares += x[static_cast<std::size_t>(row * D + d)] * x[static_cast<std::size_t>(row * D + d)];
        const double r = 1 / std::sqrt(squares / static_cast<double>(D) + call.options.epsilon);
        // Sums of D terms in several lanes; |f(z)| and |f'(z)| are at most 2 + |z|, and so is the exponent's error.
        const auto size = [&](Index d) {
            const double gate = call.has("z") ? 2 + at("z", row * D + d) : 1;
            return gate * gate * (1 + static_cast<double>(D) / 16);
        };
        for (Index d = 0; d < D; ++d) {
            const auto i = static_cast<std::size_t>(row * D + d);
            product += std::abs(dy[i]) * at("weight", d) * size(d) * std::abs(x[i]) * r;
        }
        for (Index d = 0; d < D; ++d) {
            const auto i = static_cast<std::size_t>(row * D + d);
            const double n = std::abs(x[i]) * r, w = at("weight", d);
            if (!backward) all["y"][i] = w * n * size(d);
            if (all.count("dx") > 0)
                all["dx"][i] = r * (std::abs(dy[i]) * w * size(d) + n * product / static_cast<double>(D));
            if (all.count("dz") > 0) all["dz"][i] = std::abs(dy[i]) * w * n * size(d);
            if (all.count("dweight") > 0) all["dweight"][static_cast<std::size_t>(d)] += std::abs(dy[i]) * n * size(d);
        }
    }
    return all;
}

std::string compare(const StoredByName& actual, const NumbersByName& expected, const NumbersByName& bounds,
                    const std::string& what) {
    constexpr double roundings = 40, half = 0x1p-24;  // 32 numbers are added in f32
    for (const auto& [name, stored] : actual) {
        const auto dtype = static_cast<core::DType>(stored.dtype);
        const double smallest = dtype == core::DType::f16 ? 0x1p-24 : 1e-37;
        for (std::size_t i = 0; i < stored.numbers.size(); ++i) {
            const double x = stored.numbers[i], y = expected.at(name)[i];
            const double size = std::isnan(bounds.at(name)[i]) ? infinity : bounds.at(name)[i];
            const double bound = roundings * half * size + core::epsilon_of(dtype) / 2 * std::abs(y) * 1.001 + smallest;
            if (std::isfinite(y) ? std::abs(x - y) <= bound : !std::isfinite(x)) continue;
            return what + ": " + name + "[" + std::to_string(i) + "] is " + std::to_string(x) + ", expected " +
                   std::to_string(y) + " within " + std::to_string(bound);
        }
    }
    return "";
}

}  // namespace softdelta::test
