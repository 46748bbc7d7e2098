/* A kernel without Python: the delta rule token by token, forward, f32, under the C interface's name. */
#include <softdelta/softdelta.h>
#include <stdlib.h>

static float* at(const DLTensor* t, int64_t a, int64_t b, int64_t c) {
    return (float*)t->data + a * t->strides[0] + b * t->strides[1] + c * t->strides[2];
}

static float norm_of(const DLTensor* t, const float* x, const softdelta_delta_options* options) {
    float sum = 1e-6F;
    for (int64_t i = 0; i < t->shape[3]; ++i) sum += x[i * t->strides[3]] * x[i * t->strides[3]];
    return options->use_qk_l2norm_in_kernel ? 1 / sqrtf(sum) : 1;
}

__attribute__((visibility("default"))) softdelta_status softdelta_delta_forward(const softdelta_delta_inputs* in,
                                                                                const softdelta_delta_outputs* out,
                                                                                const softdelta_delta_options* options,
                                                                                const softdelta_execution* execution) {
    (void)execution;
    if (options->rule != SOFTDELTA_RULE_DELTA || in->q->dtype.bits != 32) return SOFTDELTA_UNSUPPORTED;
    const int64_t K = in->q->shape[3], V = in->v->shape[3], HV = in->v->shape[2], group = HV / in->q->shape[2];
    const int64_t N = in->cu_seqlens ? in->cu_seqlens->shape[0] - 1 : in->q->shape[0];
    const int64_t* bounds = in->cu_seqlens ? (const int64_t*)in->cu_seqlens->data : NULL;
    const double scale = isnan(options->scale) ? 1 / sqrt((double)K) : options->scale;
    float* S = malloc(sizeof(float) * (size_t)(K * V));
    for (int64_t n = 0; n < N; ++n)
        for (int64_t h = 0; h < HV; ++h) {
            const DLTensor* s0 = in->initial_state;
            for (int64_t i = 0; i < K * V; ++i) S[i] = s0 ? at(s0, n, h, i / V)[i % V * s0->strides[3]] : 0;
            const int64_t b = bounds ? 0 : n, end = bounds ? bounds[n + 1] : in->q->shape[1];
            for (int64_t t = bounds ? bounds[n] : 0; t < end; ++t) {
                const float *q = at(in->q, b, t, h / group), *k = at(in->k, b, t, h / group), *v = at(in->v, b, t, h);
                const float q_norm = norm_of(in->q, q, options), k_norm = norm_of(in->k, k, options);
                const int64_t sq = in->q->strides[3], sk = in->k->strides[3], sv = in->v->strides[3];
                for (int64_t j = 0; j < V; ++j) {
                    float held = 0, o = 0;
                    for (int64_t i = 0; i < K; ++i) held += S[i * V + j] * k[i * sk] * k_norm;
                    const float u = *at(in->beta, b, t, h) * (v[j * sv] - held);
                    for (int64_t i = 0; i < K; ++i) {
                        S[i * V + j] += k[i * sk] * k_norm * u;
                        o += S[i * V + j] * q[i * sq] * q_norm;
                    }
                    at(out->o, b, t, h)[j * out->o->strides[3]] = (float)scale * o;
                }
            }
            for (int64_t i = 0; out->final_state && i < K * V; ++i) at(out->final_state, n, h, i / V)[i % V] = S[i];
        }
    free(S);
    return SOFTDELTA_OK;
}
