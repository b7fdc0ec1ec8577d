"""The ways a block's bytes go between two tiers. Each has a queue, a measured rate and columns of its own."""

from __future__ import annotations

from enum import StrEnum


class TransferPath(StrEnum):
    """Named source first. Without a host tier, volumes are reached from the device through a small staging buffer."""

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    HOST_TO_DISK = "host_to_disk"
    DISK_TO_DEVICE = "disk_to_device"
    HOST_TO_REMOTE = "host_to_remote"
    REMOTE_TO_HOST = "remote_to_host"
    DEVICE_TO_DISK = "device_to_disk"
    DEVICE_TO_REMOTE = "device_to_remote"
    REMOTE_TO_DEVICE = "remote_to_device"


VOLUME_PATHS = {
    ("disk", True): (TransferPath.HOST_TO_DISK, TransferPath.DISK_TO_DEVICE),
    ("disk", False): (TransferPath.DEVICE_TO_DISK, TransferPath.DISK_TO_DEVICE),
    ("remote", True): (TransferPath.HOST_TO_REMOTE, TransferPath.REMOTE_TO_HOST),
    ("remote", False): (TransferPath.DEVICE_TO_REMOTE, TransferPath.REMOTE_TO_DEVICE),
}
"""(put, load) by the name of a tier of volumes, and whether there is a host tier."""
