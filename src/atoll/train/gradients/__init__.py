"""From autograd's gradients to their mean in `p.grad`."""
