"""Starting workers through torchrun's own launcher, watching them, and stopping them."""
