// One sequence on many processes: each has some of the tokens. States of a delta rule are handed from rank to rank, and
// keys and values of attention travel around a ring. Every rank compares its part with the whole, computed by itself.
//
//     mpirun -n 4 relay_and_ring
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <softdelta/softdelta.hpp>
#include <vector>

using softdelta::DType, softdelta::Tensor;
using Floats = std::vector<float>;
using Index = std::int64_t;

constexpr Index part = 192, H = 8, D = 32;  // tokens of a rank, a multiple of 64; heads; head dimension
constexpr Index group = 2;                  // heads whose states travel together

int rank, ranks;

// Rows [first, first + count) and heads [head, head + heads) of a tensor [1, T, H, D].
Tensor view(auto& x, Index first, Index count, Index head = 0, Index heads = H) {
    return {x.data() + (first * H + head) * D, DType::f32, {1, count, heads, D}, {0, H * D, D, 1}};
}
Tensor gates(auto& x, Index first, Index count, Index head = 0, Index heads = H) {
    return {x.data() + first * H + head, DType::f32, {1, count, heads}, {0, H, 1}};
}
Tensor states(auto& x, Index head = 0, Index heads = H) {  // [1, H, D, D]
    return {x.data() + head * D * D, DType::f32, {1, heads, D, D}};
}

float largest_difference(const float* a, const float* b, Index count) {
    float largest = 0;
    for (Index i = 0; i < count; ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
    return largest;
}

struct Operands {
    Floats q, k, v, g, beta, d_o;
    softdelta::DeltaInputs delta(Index first, Index count, Index head = 0, Index heads = H) const {
        return {.q = view(q, first, count, head, heads),
                .k = view(k, first, count, head, heads),
                .v = view(v, first, count, head, heads),
                .g = gates(g, first, count, head, heads),
                .beta = gates(beta, first, count, head, heads)};
    }
};

// While rank r computes a group of heads, rank r + 1 computes the group before it.
bool relay(const Operands& x) {
    const Index tokens = ranks * part, mine = rank * part, count = group * D * D;
    const softdelta::DeltaOptions options{.rule = softdelta::Rule::gated_delta_rule, .use_qk_l2norm_in_kernel = true};
    Floats o(static_cast<std::size_t>(tokens * H * D)), entering(H * D * D), leaving(H * D * D);
    std::vector<MPI_Request> sent;
    for (Index head = 0; head < H; head += group) {
        float *in = entering.data() + head * D * D, *out = leaving.data() + head * D * D;
        if (rank > 0) MPI_Recv(in, count, MPI_FLOAT, rank - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        softdelta::DeltaInputs inputs = x.delta(mine, part, head, group);
        inputs.initial_state = states(entering, head, group);
        softdelta::delta_forward(
            inputs, {.o = view(o, mine, part, head, group), .final_state = states(leaving, head, group)}, options);
        if (rank + 1 < ranks) MPI_Isend(out, count, MPI_FLOAT, rank + 1, 0, MPI_COMM_WORLD, &sent.emplace_back());
    }
    MPI_Waitall(static_cast<int>(sent.size()), sent.data(), MPI_STATUSES_IGNORE);

    // Backward from the last rank to the first: the gradient of the state that leaves comes in.
    Floats dv(o.size()), d_entering(H * D * D), d_leaving(H * D * D);
    sent.clear();
    for (Index head = 0; head < H; head += group) {
        float *in = d_leaving.data() + head * D * D, *out = d_entering.data() + head * D * D;
        if (rank + 1 < ranks) MPI_Recv(in, count, MPI_FLOAT, rank + 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        softdelta::DeltaInputs inputs = x.delta(mine, part, head, group);
        inputs.initial_state = states(entering, head, group);
        softdelta::DeltaGradients gradients{.d_o = view(x.d_o, mine, part, head, group),
                                            .dfinal_state = states(d_leaving, head, group)};
        gradients.dv = view(dv, mine, part, head, group);
        gradients.dinitial_state = states(d_entering, head, group);
        softdelta::delta_backward(inputs, gradients, options);
        if (rank > 0) MPI_Isend(out, count, MPI_FLOAT, rank - 1, 1, MPI_COMM_WORLD, &sent.emplace_back());
    }
    MPI_Waitall(static_cast<int>(sent.size()), sent.data(), MPI_STATUSES_IGNORE);

    Floats whole(o.size()), whole_state(leaving.size()), whole_dv(o.size());
    softdelta::delta_forward(x.delta(0, tokens), {.o = view(whole, 0, tokens), .final_state = states(whole_state)},
                             options);
    softdelta::DeltaGradients gradients{.d_o = view(x.d_o, 0, tokens)};
    gradients.dv = view(whole_dv, 0, tokens);
    softdelta::delta_backward(x.delta(0, tokens), gradients, options);
    const Index at = mine * H * D, size = part * H * D;
    const bool bits = std::equal(o.begin() + at, o.begin() + at + size, whole.begin() + at) &&
                      (rank + 1 < ranks || leaving == whole_state);
    const float off = largest_difference(dv.data() + at, whole_dv.data() + at, size);
    std::printf("rank %d, relay: o %s, dv off by %.1e\n", rank,
                bits ? "has the bits of one process" : "is not that of one process", static_cast<double>(off));
    return bits && off < 1e-4F;
}

// Step s: keys and values of rank (rank − s) mod P are here. They go on while their part of the softmax is computed.
bool ring(const Operands& x) {
    const Index tokens = ranks * part, mine = rank * part, size = part * H * D;
    const auto own = [&](const Floats& t) { return Floats(t.begin() + mine * H * D, t.begin() + mine * H * D + size); };
    Floats k = own(x.k), v = own(x.v), next_k(k.size()), next_v(v.size());
    Floats o(k.size()), lse(H * part, -INFINITY), o_step(o), lse_step(lse), o_next(o), lse_next(lse);
    const auto result = [](auto& of_o, auto& of_lse) {
        return softdelta::AttentionOutputs{view(of_o, 0, part), Tensor(of_lse.data(), DType::f32, {1, H, part})};
    };
    for (int step = 0; step < ranks; ++step) {
        const int source = (rank - step + ranks) % ranks;
        MPI_Request moves[4];
        const int to = (rank + 1) % ranks, from = (rank - 1 + ranks) % ranks, count = static_cast<int>(size);
        MPI_Isend(k.data(), count, MPI_FLOAT, to, 2, MPI_COMM_WORLD, &moves[0]);
        MPI_Isend(v.data(), count, MPI_FLOAT, to, 3, MPI_COMM_WORLD, &moves[1]);
        MPI_Irecv(next_k.data(), count, MPI_FLOAT, from, 2, MPI_COMM_WORLD, &moves[2]);
        MPI_Irecv(next_v.data(), count, MPI_FLOAT, from, 3, MPI_COMM_WORLD, &moves[3]);
        if (source <= rank) {  // later keys are hidden
            softdelta::attention_forward(
                {.q = view(x.q, mine, part), .k = view(k, 0, part), .v = view(v, 0, part)}, result(o_step, lse_step),
                {.causal = softdelta::Causal::top_left, .query_offset = mine, .key_offset = source * part});
            const softdelta::AttentionOutputs parts[] = {result(o, lse), result(o_step, lse_step)};
            softdelta::attention_merge(parts, result(o_next, lse_next));
            o.swap(o_next), lse.swap(lse_next);
        }
        MPI_Waitall(4, moves, MPI_STATUSES_IGNORE);
        k.swap(next_k), v.swap(next_v);
    }
    Floats whole(static_cast<std::size_t>(tokens * H * D));
    softdelta::attention_forward({.q = view(x.q, 0, tokens), .k = view(x.k, 0, tokens), .v = view(x.v, 0, tokens)},
                                 {.o = view(whole, 0, tokens)}, {.causal = softdelta::Causal::top_left});
    const float off = largest_difference(o.data(), whole.data() + mine * H * D, size);
    std::printf("rank %d, ring: o off by %.1e\n", rank, static_cast<double>(off));
    return off < 1e-5F;
}

int main(int count, char** arguments) {
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    std::mt19937 random(1);  // the same operands everywhere
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform;
    const auto rows = static_cast<std::size_t>(ranks * part * H);
    Operands x{Floats(rows * D), Floats(rows * D), Floats(rows * D), Floats(rows), Floats(rows), Floats(rows * D)};
    for (Floats* t : {&x.q, &x.k, &x.v, &x.d_o}) std::generate(t->begin(), t->end(), [&] { return normal(random); });
    for (float& g : x.g) g = -0.2F * uniform(random);
    for (float& beta : x.beta) beta = uniform(random);
    int right = relay(x) && ring(x), all = 0;
    MPI_Allreduce(&right, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    MPI_Finalize();
    return all == 1 ? 0 : 1;
}
