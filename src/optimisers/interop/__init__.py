"""Rules to and from other libraries."""
