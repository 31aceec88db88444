def quantise_affine(source, format):
    raise NotImplementedError
