// Carries the precompiled <torch/torch.h> that other targets reuse.
