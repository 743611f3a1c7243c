"""The kernels' sources, in C++ and Triton, and how the C++ ones are built."""
