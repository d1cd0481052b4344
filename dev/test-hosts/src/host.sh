# The first process of a host. Its namespaces are new: network, mounts, names, processes.
# Arguments: folder of the host, its name, its address with the length of the prefix.
#
# Lines on standard input, answered on standard output: the network kit plugs the cable in between.
# At the end of the input the host is switched off: the kernel ends every process in it.
set -e
folder=$1 name=$2 address=$3

mount --make-rprivate /
mount -t proc proc /proc
# The interfaces of this host, not those of the machine. Not every container allows it.
mount -t sysfs sysfs /sys 2>/dev/null || true
mount -t tmpfs tmpfs /run
mkdir -p -m 0755 /run/sshd
mount -t tmpfs -o size=1g tmpfs /dev/shm
for file in hosts passwd shadow nsswitch.conf; do
    mount --bind "$folder/etc/$file" "/etc/$file"
done
echo "$name" >/proc/sys/kernel/hostname
ip link set lo up
echo ready

read -r plugged_in
ip address add "$address" dev eth0
ip link set eth0 up
: >"$folder/sshd.log"
env -i PATH="$PATH" /usr/sbin/sshd -D -e -f "$folder/sshd_config" 2>>"$folder/sshd.log" </dev/null >/dev/null &
sshd=$!
until grep -q 'Server listening' "$folder/sshd.log"; do
    if ! kill -0 $sshd 2>/dev/null; then
        cat "$folder/sshd.log" >&2
        exit 1
    fi
    sleep 0.01
done
echo up

# In the foreground, so that the shell also takes in the ends of processes that have lost their parent.
cat >/dev/null || true
exit 0
