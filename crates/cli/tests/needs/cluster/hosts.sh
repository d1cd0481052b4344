#!/bin/sh
# Two hosts in namespaces: node1 is this process's, node2 has a network and a name of its own.
# Run by `unshare` as the first process of new namespaces; when it dies, everything in them does.
set -e
folder=$1

# What is mounted here is seen by no other process.
mount -t tmpfs none /run
mkdir -m 755 /run/munge
mount --bind "$folder/hosts" /etc/hosts

hostname node1
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
ip addr add 10.77.0.1/24 dev br0

unshare --net --uts sleep infinity &
node2=$!
while [ "$(readlink /proc/$node2/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.01; done
ip link add veth2 type veth peer name eth0 netns "$node2"
ip link set veth2 master br0 up
nsenter -t "$node2" -n -u sh -e -c '
    hostname node2
    ip link set lo up
    ip addr add 10.77.0.2/24 dev eth0
    ip link set eth0 up'
echo "$node2" > "$folder/node2"

if [ -n "$2" ]; then
    munged --foreground --num-threads=2 --key-file="$folder/munge.key" \
        --log-file=/dev/null --seed-file="$folder/munge.seed" &
    slurmctld -D &
    slurmd -D -N node1 &
    nsenter -t "$node2" -n -u slurmd -D -N node2 &
fi
touch "$folder/ready"
wait
