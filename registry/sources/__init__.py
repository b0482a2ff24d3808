"""Where the registry fetches adapters from: one module per kind of place, one small protocol for all."""
