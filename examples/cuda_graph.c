/* Decode on a GPU in a CUDA graph: one token of every sequence, states in place, captured once and replayed. A graph
 * holds addresses, so that the program writes the next token's operands where the last token's were. The call has its
 * workspace: it allocates nothing and waits for nothing. At the end the states are compared with the f64 reference on
 * the host. Exits with 77 where there is no GPU. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <softdelta/softdelta.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 3, H = 2, HV = 4, K = 64, V = 64, TOKENS = 12 };
enum { QK = B * H * K, VO = B * HV * V, GATES = B * HV, STATES = B * HV * K * V };
enum { OPERANDS = 2 * QK + VO + 2 * GATES }; /* q k v g beta of one token, one after the other */

static void must(int ok, const char* what) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, softdelta_last_error());
    exit(1);
}

static void cuda(cudaError_t code) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(code));
    exit(1);
}

static DLTensor view(float* data, DLDeviceType device, int ndim, int64_t* shape) {
    DLTensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.device.device_type = device;
    t.ndim = ndim;
    t.dtype.code = kDLFloat;
    t.dtype.bits = 32;
    t.dtype.lanes = 1;
    t.shape = shape;
    return t;
}

/* A call of one token on `device`: o and the states of `operands`. Its tensors point into it: it is not copied. */
struct step {
    int64_t qk_shape[4], v_shape[4], gate_shape[3], state_shape[4];
    DLTensor q, k, v, g, beta, o, state;
    softdelta_delta_inputs in;
    softdelta_delta_outputs out;
    softdelta_delta_options options;
    softdelta_execution execution;
};

static void describe(struct step* s, DLDeviceType device, float* operands, float* o, float* states) {
    const int64_t qk[4] = {B, 1, H, K}, v[4] = {B, 1, HV, V}, gate[3] = {B, 1, HV}, state[4] = {B, HV, K, V};
    memcpy(s->qk_shape, qk, sizeof qk);
    memcpy(s->v_shape, v, sizeof v);
    memcpy(s->gate_shape, gate, sizeof gate);
    memcpy(s->state_shape, state, sizeof state);
    s->q = view(operands, device, 4, s->qk_shape);
    s->k = view(operands + QK, device, 4, s->qk_shape);
    s->v = view(operands + 2 * QK, device, 4, s->v_shape);
    s->g = view(operands + 2 * QK + VO, device, 3, s->gate_shape);
    s->beta = view(operands + 2 * QK + VO + GATES, device, 3, s->gate_shape);
    s->o = view(o, device, 4, s->v_shape);
    s->state = view(states, device, 4, s->state_shape);
    s->in = softdelta_delta_inputs_default();
    s->in.q = &s->q, s->in.k = &s->k, s->in.v = &s->v, s->in.g = &s->g, s->in.beta = &s->beta;
    s->in.initial_state = &s->state;
    memset(&s->out, 0, sizeof s->out);
    s->out.size = sizeof s->out;
    s->out.o = &s->o;
    s->out.final_state = &s->state; /* in place */
    s->options = softdelta_delta_options_default(SOFTDELTA_RULE_GATED_DELTA);
    s->options.use_qk_l2norm_in_kernel = 1;
    s->execution = softdelta_execution_default();
}

/* Operands of one token of all sequences: any numbers that depend on the token alone. */
static void fill(float* x, int token) {
    int i;
    for (i = 0; i < 2 * QK + VO; ++i) x[i] = (float)sin(0.37 * (token + 1) * (i + 1));
    for (; i < 2 * QK + VO + GATES; ++i) x[i] = (float)(-0.02 * (i % 7 + 1));
    for (; i < OPERANDS; ++i) x[i] = (float)(0.5 + 0.4 * sin(token + i));
}

int main(void) {
    static float host[OPERANDS], o[VO], o_truth[VO], states[STATES], truth[STATES];
    struct step gpu, cpu;
    float *operands, *o_gpu, *states_gpu;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    size_t bytes = 0;
    double error = 0;
    int devices = 0, i, t;

    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        puts("no GPU");
        return 77;
    }
    cuda(cudaStreamCreate(&stream));
    cuda(cudaMalloc((void**)&operands, sizeof host));
    cuda(cudaMalloc((void**)&o_gpu, sizeof o));
    cuda(cudaMalloc((void**)&states_gpu, sizeof states));
    cuda(cudaMemset(states_gpu, 0, sizeof states));

    describe(&gpu, kDLCUDA, operands, o_gpu, states_gpu);
    gpu.execution.stream = stream;
    must(softdelta_delta_forward_workspace(&gpu.in, &gpu.out, &gpu.options, &gpu.execution, &bytes) == SOFTDELTA_OK,
         "the size of the workspace");
    if (bytes > 0) cuda(cudaMalloc(&gpu.execution.workspace, bytes));
    gpu.execution.workspace_size = bytes;

    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    must(softdelta_delta_forward(&gpu.in, &gpu.out, &gpu.options, &gpu.execution) == SOFTDELTA_OK, "the captured call");
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&replay, graph, 0));

    describe(&cpu, kDLCPU, host, o_truth, truth);
    cpu.execution.engine = "reference";
    for (t = 0; t < TOKENS; ++t) {
        fill(host, t);
        cuda(cudaMemcpyAsync(operands, host, sizeof host, cudaMemcpyHostToDevice, stream));
        cuda(cudaGraphLaunch(replay, stream));
        cuda(cudaStreamSynchronize(stream)); /* host is filled anew above */
        must(softdelta_delta_forward(&cpu.in, &cpu.out, &cpu.options, &cpu.execution) == SOFTDELTA_OK, "the reference");
    }
    cuda(cudaMemcpy(o, o_gpu, sizeof o, cudaMemcpyDeviceToHost));
    cuda(cudaMemcpy(states, states_gpu, sizeof states, cudaMemcpyDeviceToHost));
    for (i = 0; i < VO; ++i) error = fmax(error, fabs(o[i] - o_truth[i]));
    for (i = 0; i < STATES; ++i) error = fmax(error, fabs(states[i] - truth[i]));
    printf("%d tokens by one graph, workspace of %zu bytes: largest error of o and the states %.1e, %s\n", TOKENS,
           bytes, error, error < 1e-5 ? "right" : "WRONG");
    return error < 1e-5 ? 0 : 1;
}
