"""Stand-ins for torchvision and triton, which SGLang imports at start-up and never runs on a CPU.

Imported by the environment's `.pth` file, in each of its processes. The finder comes last: an installed package wins.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

PACKAGES = ("torchvision", "triton")


class _Kind(type):
    """A class whose missing attributes are again such classes."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Anything(metaclass=_Kind):
    """Takes any call; called with one function it is a decorator that changes nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()


def _anything(name):
    return _Kind(name, (_Anything,), {})


def _decorator(*args, **kwargs):
    return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function


class _Constexpr:
    def __init__(self, value=None):
        self.value = value


# What is looked at while modules are imported and must therefore be real.
REAL = {
    "triton": {
        "__version__": "3.6.0",
        "jit": _decorator,
        "autotune": _decorator,
        "heuristics": _decorator,
        "cdiv": lambda a, b: -(a // -b),
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
    },
    "triton.backends": {"backends": {}},
    "triton.language": {"constexpr": _Constexpr},
    "triton.runtime": {},
    "triton.runtime.driver": {},
    "triton.runtime.jit": {"JITFunction": type("JITFunction", (), {})},
    "triton.runtime.autotuner": {
        "OutOfResources": type("OutOfResources", (Exception,), {}),
        "PTXASError": type("PTXASError", (Exception,), {}),
    },
}


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name == "__version__":
            return "0.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full == "triton.runtime.driver.active":
            raise RuntimeError("no GPU driver")  # SGLang then takes the CPU
        value = importlib.import_module(full) if full in REAL or full in sys.modules else _anything(name)
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        vars(module).update(REAL.get(spec.name, {}))
        return module

    def exec_module(self, module):
        pass


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


sys.meta_path.append(_Finder())
