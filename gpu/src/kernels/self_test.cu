// squares[i] = i * i: the smallest kernel that exercises compilation, launch and copy.
//
// CPU twin: the closed form in ../self_test.rs. Launch: one thread per element, any block size.

struct Arguments {
    unsigned int* squares; // (n,)
    unsigned int n;
};

extern "C" __global__ void squares(const Arguments a) {
    const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < a.n) a.squares[i] = i * i;
}
