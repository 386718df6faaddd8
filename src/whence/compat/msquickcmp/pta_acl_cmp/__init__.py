"""`msquickcmp.pta_acl_cmp`: PyTorch against the acceleration library."""
