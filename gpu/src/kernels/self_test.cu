// out[i] = i * i: the smallest kernel that shows compilation, launch and copy at work.
//
// CPU twin: the closed form in ../self_test.rs. Shapes: out (n,). Launch: one thread an element, any block size.

extern "C" __global__ void squares(unsigned int *out, unsigned int n) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i * i;
}
