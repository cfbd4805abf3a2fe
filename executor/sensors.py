"""What the driver says of the device: SM clock, temperature, driver version. By NVML, part of the driver."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK, GPU_TEMPERATURE = 1, 0
"""NVML's numbers for a clock domain and a sensor."""


class Reading(NamedTuple):
    """SM clock and temperature; None where the driver does not say."""

    clock_mhz: int | None
    temperature_c: int | None


class Sensors:
    """The sensors of `device`. Without NVML, or on a CPU, every reading is None and `driver` is blank."""

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        self._library = _open() if device.type == "cuda" else None
        self.driver = ""
        if self._library is None:
            return
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        name = ctypes.create_string_buffer(96)
        if self._library.nvmlSystemGetDriverVersion(name, len(name)) == 0:
            self.driver = name.value.decode()
        if self._library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(self._handle)) != 0:
            self._library = None

    def read(self) -> Reading:
        """Both sensors now."""
        library = self._library
        if library is None:
            return Reading(None, None)
        value = ctypes.c_uint()
        has_clock = library.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK, ctypes.byref(value)) == 0
        clock_mhz = value.value if has_clock else None
        has_temperature = (
            library.nvmlDeviceGetTemperature(self._handle, GPU_TEMPERATURE, ctypes.byref(value)) == 0
        )
        return Reading(clock_mhz, value.value if has_temperature else None)


def median_reading(readings: Sequence[Reading]) -> Reading:
    """The middle clock and the middle temperature of those that were read."""
    clocks = sorted(item.clock_mhz for item in readings if item.clock_mhz is not None)
    temperatures = sorted(item.temperature_c for item in readings if item.temperature_c is not None)
    return Reading(
        clocks[len(clocks) // 2] if clocks else None,
        temperatures[len(temperatures) // 2] if temperatures else None,
    )


def _open() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None
