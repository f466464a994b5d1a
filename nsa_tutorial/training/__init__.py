"""Part IV: gradients, decoding, training. So far, the gradients of the reference operators."""
