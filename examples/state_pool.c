/* Delta-rule states of a server that serves many sequences. Each sequence owns one entry of a pool of states. One call
 * reads the prompts (prefill); then each call takes one token of every running sequence (decode). Both update the pool
 * in place. At the end a sequence is compared with the f64 reference, which reads it in one piece. */
#include <math.h>
#include <softdelta/softdelta.h>
#include <stdio.h>

enum { POOL = 4, H = 2, HV = 4, K = 32, V = 32, STATE = HV * K * V, MOST = 64 }; /* MOST: tokens of one call */

static float q[MOST * H * K], k[MOST * H * K], v[MOST * HV * V], g[MOST * HV], beta[MOST * HV];
static float o[MOST * HV * V], pool[POOL * STATE];

static DLTensor view(void* data, uint8_t code, uint8_t bits, int ndim, int64_t* shape) {
    DLTensor t = {0};
    t.data = data;
    t.device.device_type = kDLCPU;
    t.ndim = ndim;
    t.dtype.code = code;
    t.dtype.bits = bits;
    t.dtype.lanes = 1;
    t.shape = shape;
    return t;
}

/* Operands of one token at row `row`: any numbers that depend on sequence and token alone, as a model's would. */
static void fill(int row, int sequence, int token) {
    const double x = 100 * sequence + token + 1;
    int i;
    for (i = 0; i < H * K; ++i)
        q[row * H * K + i] = (float)sin(x * (i + 1)), k[row * H * K + i] = (float)cos(x * (i + 2));
    for (i = 0; i < HV * V; ++i) v[row * HV * V + i] = (float)sin(0.7 * x * (i + 3));
    for (i = 0; i < HV; ++i)
        g[row * HV + i] = (float)(-0.1 * (i + 1)), beta[row * HV + i] = (float)(0.5 + 0.4 * sin(x));
}

/* `batch` sequences of `tokens` rows each; with cu_seqlens, `sequences` of them packed into one row of the batch. */
static int forward(int64_t batch, int64_t tokens, int64_t sequences, int32_t* cu_seqlens, int32_t* entries,
                   float* states, int64_t state_count, const char* engine) {
    int64_t qk_shape[4] = {batch, tokens, H, K}, v_shape[4] = {batch, tokens, HV, V}, g_shape[3] = {batch, tokens, HV};
    int64_t state_shape[4] = {state_count, HV, K, V}, cu_shape[1] = {sequences + 1}, entry_shape[1] = {sequences};
    DLTensor q_view = view(q, kDLFloat, 32, 4, qk_shape), k_view = view(k, kDLFloat, 32, 4, qk_shape);
    DLTensor v_view = view(v, kDLFloat, 32, 4, v_shape), o_view = view(o, kDLFloat, 32, 4, v_shape);
    DLTensor g_view = view(g, kDLFloat, 32, 3, g_shape), beta_view = view(beta, kDLFloat, 32, 3, g_shape);
    DLTensor state = view(states, kDLFloat, 32, 4, state_shape), cu = view(cu_seqlens, kDLInt, 32, 1, cu_shape);
    DLTensor indices = view(entries, kDLInt, 32, 1, entry_shape);
    softdelta_delta_inputs in = softdelta_delta_inputs_default();
    softdelta_delta_options options = softdelta_delta_options_default(SOFTDELTA_RULE_GATED_DELTA);
    softdelta_delta_outputs out = {sizeof out, &o_view, &state, NULL,
                                   NULL}; /* final_state is initial_state: in place */
    softdelta_execution execution = softdelta_execution_default();
    in.q = &q_view, in.k = &k_view, in.v = &v_view, in.g = &g_view, in.beta = &beta_view, in.initial_state = &state;
    in.cu_seqlens = cu_seqlens ? &cu : NULL;
    in.state_indices = entries ? &indices : NULL;
    options.use_qk_l2norm_in_kernel = 1;
    execution.engine = engine;
    if (softdelta_delta_forward(&in, &out, &options, &execution) == SOFTDELTA_OK) return 1;
    fprintf(stderr, "%s\n", softdelta_last_error());
    return 0;
}

int main(void) {
    enum { PROMPT_A = 21, PROMPT_B = 6, STEPS = 10 };
    int32_t cu_seqlens[3] = {0, PROMPT_A, PROMPT_A + PROMPT_B}, prefill[2] = {2, 0}, decode[3] = {2, -1, 0};
    static float last[HV * V], truth[STATE];
    double error = 0;
    int i, t;

    for (t = 0; t < PROMPT_A; ++t) fill(t, 0, t);
    for (t = 0; t < PROMPT_B; ++t) fill(PROMPT_A + t, 1, t);
    if (!forward(1, PROMPT_A + PROMPT_B, 2, cu_seqlens, prefill, pool, POOL, "automatic")) return 1;
    printf("prefill: prompts of %d and %d tokens, states in entries 2 and 0 of %d\n", PROMPT_A, PROMPT_B, POOL);

    for (t = 0; t < STEPS; ++t) { /* a batch of 3 rows, of which the middle one is padding: entry -1 */
        fill(0, 0, PROMPT_A + t);
        fill(2, 1, PROMPT_B + t);
        if (!forward(3, 1, 3, NULL, decode, pool, POOL, "automatic")) return 1;
        for (i = 0; i < HV * V; ++i)
            if (o[HV * V + i] != 0) return 1;
    }
    printf("decode:  %d tokens of both sequences, one row of padding\n", STEPS);
    for (i = 0; i < HV * V; ++i) last[i] = o[i];

    for (t = 0; t < PROMPT_A + STEPS; ++t) fill(t, 0, t);
    if (!forward(1, PROMPT_A + STEPS, 1, NULL, NULL, truth, 1, "reference")) return 1;
    for (i = 0; i < HV * V; ++i) error = fmax(error, fabs(last[i] - o[(PROMPT_A + STEPS - 1) * HV * V + i]));
    for (i = 0; i < STATE; ++i) error = fmax(error, fabs(pool[2 * STATE + i] - truth[i]));
    for (i = 0; i < STATE; ++i) error = fmax(error, fabs(pool[1 * STATE + i]) + fabs(pool[3 * STATE + i])); /* unused */
    printf("largest error of the last o and the state against the f64 reference: %.1e, %s\n", error,
           error < 1e-5 ? "right" : "WRONG");
    return error < 1e-5 ? 0 : 1;
}
