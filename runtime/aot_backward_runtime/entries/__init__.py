"""What ``Package.module()`` and ``Package.grad()`` return: a call is matched to a variant and run, also by autograd."""
