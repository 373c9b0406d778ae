"""The papers' equations: computation, communication, memory; one small function each."""
