"""The operations that models are written in, and the backends that provide them."""
