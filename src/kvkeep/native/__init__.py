"""The native library: C++ kernels behind one C header, and the one module that calls them (``library.py``)."""
