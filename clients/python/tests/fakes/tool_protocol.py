"""What the fake frameworks share: a function's parameters and texts, as a model is shown them."""

import inspect


def describe(function):
    """Returns description and {parameter: (type, text)}. Every parameter must have both."""
    doc = inspect.getdoc(function)
    if not doc:
        raise ValueError(f"{function.__name__}: a tool needs a docstring")
    description, _, tail = doc.partition("\n\nArgs:\n")
    texts = {}
    for line in tail.splitlines():
        name, colon, text = line.strip().partition(": ")
        if colon:
            texts[name] = text
    parameters = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.annotation is inspect.Parameter.empty or name not in texts:
            raise ValueError(f"{function.__name__}: parameter {name} has no type or no text")
        parameters[name] = (parameter.annotation, texts[name])
    if set(texts) != set(parameters):
        raise ValueError(f"{function.__name__}: the docstring has other parameters")
    return description, parameters


def check(parameters, arguments):
    """Raises for arguments that a schema of the parameters refuses."""
    if set(arguments) != set(parameters):
        raise ValueError(f"arguments {sorted(arguments)}: want {sorted(parameters)}")
    for name, value in arguments.items():
        if not isinstance(value, parameters[name][0]):
            raise ValueError(f"argument {name} is a {type(value).__name__}")


def schema(parameters):
    """Returns the JSON Schema of parameters that are texts."""
    assert all(kind is str for kind, _ in parameters.values())
    return {
        "type": "object",
        "properties": {n: {"type": "string", "description": t} for n, (_, t) in parameters.items()},
        "required": list(parameters),
        "additionalProperties": False,
    }
