"""Starting workers through torchrun's launcher, watching them, and stopping them."""
