"""The only thing between the stages: hidden states, tokens and top-k logits in one Zarr v3 group, written shard by shard."""
