// Adds the parts of a head, in their order, to what was there.

extern "C" __global__ void __launch_bounds__(256) svd_gram_join(const Sums a) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const u32 i = blockIdx.x * 256 + threadIdx.x, head = blockIdx.y, row = i / DIM, column = i % DIM;
    if (i >= PART || (row < DIM && column < row)) return;
    const float* parts = a.parts + (u64)head * a.part_count * PART + i;
    double sum = 0;
#pragma unroll 16
    for (u32 part = 0; part < a.part_count; part++) sum += parts[(u64)part * PART];
    if (row == DIM) {
        a.sums[head * DIM + column] += sum;
        return;
    }
    double* matrix = a.matrices + (u64)head * DIM * DIM;
    sum += matrix[row * DIM + column];
    matrix[row * DIM + column] = sum;
    matrix[column * DIM + row] = sum;
}
