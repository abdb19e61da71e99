"""A fake of smolagents, for tests where it cannot be had: only what tools need."""


class Tool:
    skip_forward_signature_validation = False

    def __init__(self):
        for attribute in ("name", "description", "output_type"):
            if not isinstance(getattr(self, attribute), str):
                raise TypeError(f"{attribute} must be text")
        if not self.name.isidentifier() or self.output_type != "string":
            raise ValueError(f"tool {self.name}: bad name or output type")
        for name, given in self.inputs.items():
            if given["type"] != "string" or not given["description"]:
                raise ValueError(f"tool {self.name}: input {name} is not described")

    def __call__(self, **arguments):
        if set(arguments) != set(self.inputs):
            raise TypeError(f"arguments {sorted(arguments)}: want {sorted(self.inputs)}")
        return self.forward(**arguments)
