/* The library from pure C: attention of one query over two equal keys is the mean of their values. */
#include <math.h>
#include <softdelta/softdelta.h>
#include <stdio.h>

static DLTensor view(float* data, int ndim, int64_t* shape) {
    DLTensor t = {0};
    t.data = data;
    t.device.device_type = kDLCPU;
    t.ndim = ndim;
    t.dtype.code = kDLFloat;
    t.dtype.bits = 32;
    t.dtype.lanes = 1;
    t.shape = shape; /* strides stay null: row-major */
    return t;
}

int main(void) {
    float q_data[2] = {1, 2}, k_data[4] = {3, 4, 3, 4}, v_data[4] = {1, 10, 3, 30}, o_data[2], lse_data[1];
    int64_t one_row[4] = {1, 1, 1, 2}, two_rows[4] = {1, 2, 1, 2}, lse_shape[3] = {1, 1, 1}; /* [B, L, H, D] */
    DLTensor q = view(q_data, 4, one_row), k = view(k_data, 4, two_rows), v = view(v_data, 4, two_rows);
    DLTensor o = view(o_data, 4, one_row), lse = view(lse_data, 3, lse_shape);

    softdelta_attention_inputs inputs = softdelta_attention_inputs_default();
    softdelta_attention_outputs outputs = {sizeof outputs, NULL, NULL};
    inputs.q = &q;
    inputs.k = &k;
    inputs.v = &v;
    outputs.o = &o;
    outputs.lse = &lse;
    if (softdelta_attention_forward(&inputs, &outputs, NULL, NULL) != SOFTDELTA_OK) {
        fprintf(stderr, "%s\n", softdelta_last_error());
        return 1;
    }
    printf("softdelta %s: o = %g %g, lse = %g\n", softdelta_version(), o_data[0], o_data[1], lse_data[0]);
    if (o_data[0] != 2 || o_data[1] != 20 || fabs(lse_data[0] - (11 / sqrt(2) + log(2))) > 1e-6) return 1;

    outputs.o = &lse; /* a wrong shape is an error with a message, and nothing aborts */
    if (softdelta_attention_forward(&inputs, &outputs, NULL, NULL) != SOFTDELTA_INVALID_ARGUMENT) return 1;
    printf("refused as it should be: %s\n", softdelta_last_error());
    return 0;
}
