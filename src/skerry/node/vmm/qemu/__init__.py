"""QEMU as the virtual machine monitor: `microvm` machines, with KVM or in emulation."""
