"""Entry objects returned by ``Package.module()`` and ``Package.grad()``. Each call, also by autograd, is matched to a
variant and run."""
