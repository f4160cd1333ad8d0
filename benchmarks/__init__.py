"""Speed of the kernels beside public implementations: python -m benchmarks --help"""
