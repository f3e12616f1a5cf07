"""The normal form of a tensor, a sum of products over labelled axes, and how nodes make it."""
