"""Service links: Kubernetes puts the address of every Service of a namespace into each pod's environment.

A Service named spire-gateway becomes SPIRE_GATEWAY_PORT=tcp://10.0.0.1:8000, which is the name of an option.
"""

from __future__ import annotations

import os
import re

_LINK = re.compile(r"(tcp|udp|sctp)://\S+")


def explain_link(variable: str) -> str:
    """What is wrong with this environment variable if it is a service link; empty where it is none."""
    value = os.environ.get(variable, "")
    if not _LINK.fullmatch(value):
        return ""
    service = variable.removesuffix("_PORT").lower().replace("_", "-")
    return (
        f"{variable}={value} looks like the link to a Kubernetes Service named {service}, not like a port: set "
        f"enableServiceLinks: false in the pod, set {variable} there, or rename the Service"
    )
