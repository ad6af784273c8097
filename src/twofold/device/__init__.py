"""The device: model, paged attention, KV pool and sampling. Only this package imports torch."""
