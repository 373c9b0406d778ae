"""One policy a file; each names its ``POLICIES``, and ``policy.all_policies`` finds them."""
