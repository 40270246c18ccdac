#!/bin/sh
# PID 1 of every guest until the agent is: mounts the disks and becomes the agent. busybox sh, from the initramfs.
# @MODULES@ and @AGENT@ are filled in when the initramfs is made.

die() {
    echo "skerry-init: $1: the guest cannot start" >/dev/console
    poweroff -f
    reboot -f
}

# $1: a device, which is there as soon as its driver is; a busy host may take a moment.
wait_for() {
    tries=0
    while [ ! -b "$1" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 200 ] || die "no disk $1"
        sleep 0.05
    done
}

mount -t proc -o nosuid,nodev,noexec proc /proc || die "no /proc"
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys || die "no /sys"
mount -t devtmpfs -o nosuid,mode=0755 dev /dev || die "no /dev"
modprobe -a @MODULES@ || die "a driver did not load"

wait_for /dev/vda
mount -t ext4 -o rw /dev/vda /new || die "the root disk /dev/vda did not mount"
cd /new || die "no root"
for name in proc sys dev run; do
    [ -d "$name" ] || mkdir "$name" || die "the root filesystem has no /$name and none could be made"
done
[ -d tmp ] || mkdir -m 1777 tmp || die "no /tmp"
mount -t tmpfs -o nosuid,nodev,mode=0755 run run || die "no /run"

# Everyone may pass through, nobody but root may list it: the agent's own files in it guard themselves.
mkdir -m 0711 run/skerry && mkdir run/skerry/agent || die "no /run/skerry"
wait_for /dev/vdb
mount -t ext4 -o ro,nosuid,nodev /dev/vdb run/skerry/agent || die "the agent's disk /dev/vdb did not mount"

mkdir /dev/pts /dev/shm
mount -t devpts -o nosuid,noexec,gid=5,mode=0620,ptmxmode=0666 devpts /dev/pts || die "no /dev/pts"
mount -t tmpfs -o nosuid,nodev,mode=1777 shm /dev/shm || die "no /dev/shm"
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr

for name in dev proc sys; do
    mount --move "/$name" "$name" || die "/$name did not move"
done
exec switch_root /new @AGENT@
die "the agent did not start"
