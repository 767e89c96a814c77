"""What kernels are asked for in tests."""

from ooc_gemm.cuda_kernels.product import Operand, Product


def as_product(m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    """The product of matrices at these addresses, with these leading dimensions."""
    return Product(m, n, k, alpha, Operand(a, lda), Operand(b, ldb), beta, Operand(c, ldc))
