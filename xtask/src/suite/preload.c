/* Preloaded into test programs, for less processor time. Programs that a test starts do not get the library, and run as
 * they do for users; where cargo and rustdoc have it, too, the doc tests are told from them by name.
 *
 * The process ends when main returns, without the destructors of libtorch's operators, which take a third of the time of
 * a test that computes little.
 *
 * With XTASK_FORK_SERVER the process is a fork server: it has loaded libtorch, which registers some thousand operators,
 * and forks before main for each test. forks.rs is the client and describes the messages.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int main_function(int, char **, char **);
typedef int start_function(main_function *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

static main_function *test_main;

static void leave(int status, void *unused) {
    (void)unused;
    fflush(NULL);
    _exit(status);
}

/* Standard input, output and error, and the working directory. */
#define DESCRIPTORS 4
/* Tests that run at once. */
#define CHILDREN 256
/* Milliseconds without a test after which a server ends, so that not every test program stays in memory. A test that
 * comes later starts another one. */
#define IDLE 5000

struct request {
    uint32_t group, arguments, variables, bytes;
};

struct outcome {
    int64_t status, user, system;
};

struct child {
    pid_t process;
    int connection;
};

/* Only the thread that forks is in the new process: with others, locks could be held for ever. */
static int has_one_thread(void) {
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    if (!tasks) {
        return 0;
    }
    for (struct dirent *entry = readdir(tasks); entry; entry = readdir(tasks)) {
        count += entry->d_name[0] != '.';
    }
    closedir(tasks);
    return count == 1;
}

static int read_all(int file, char *bytes, size_t count) {
    while (count > 0) {
        ssize_t part = read(file, bytes, count);
        if (part <= 0) {
            return 0;
        }
        bytes += part;
        count -= (size_t)part;
    }
    return 1;
}

static int receive(int connection, struct request *request, int descriptors[DESCRIPTORS]) {
    char control[CMSG_SPACE(sizeof(int) * DESCRIPTORS)];
    struct iovec part = {request, sizeof *request};
    struct msghdr message = {0};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(connection, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *request) {
        return 0;
    }
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_len != CMSG_LEN(sizeof(int) * DESCRIPTORS)) {
        return 0;
    }
    memcpy(descriptors, CMSG_DATA(header), sizeof(int) * DESCRIPTORS);
    return 1;
}

static char **strings(char **next, uint32_t count) {
    char **list = calloc((size_t)count + 1, sizeof *list);
    for (uint32_t index = 0; index < count; index++) {
        list[index] = *next;
        *next += strlen(*next) + 1;
    }
    return list;
}

/* Makes the new process the one that the request describes. */
static void become(const struct request *request, const int descriptors[DESCRIPTORS], int connection) {
    if (setpgid(0, (pid_t)request->group) != 0 || fchdir(descriptors[DESCRIPTORS - 1]) != 0) {
        _exit(127);
    }
    for (int index = 0; index < DESCRIPTORS - 1; index++) {
        if (dup2(descriptors[index], index) < 0) {
            _exit(127);
        }
    }
    for (int index = 0; index < DESCRIPTORS; index++) {
        close(descriptors[index]);
    }
    if (send(connection, "1", 1, MSG_NOSIGNAL) != 1) {
        _exit(127);
    }
    close(connection);
}

static void tell(struct child *children, int *count) {
    int status;
    struct rusage usage;
    pid_t process;
    while ((process = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        for (int index = 0; index < *count; index++) {
            if (children[index].process == process) {
                char answer[1 + sizeof(struct outcome)] = {'2'};
                struct outcome outcome = {status, usage.ru_utime.tv_sec * INT64_C(1000000) + usage.ru_utime.tv_usec,
                                          usage.ru_stime.tv_sec * INT64_C(1000000) + usage.ru_stime.tv_usec};
                memcpy(answer + 1, &outcome, sizeof outcome);
                send(children[index].connection, answer, sizeof answer, MSG_NOSIGNAL);
                close(children[index].connection);
                children[index] = children[--*count];
                break;
            }
        }
    }
}

/* Returns in the process of a test, with its arguments; the server itself ends. */
static void serve(const char *path, int *argument_count, char ***arguments) {
    struct child children[CHILDREN];
    int count = 0;
    const char *library = getenv("XTASK_FORK_LIBRARY"), *parent = getenv("XTASK_FORK_PARENT");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    sigset_t blocked, before;
    if (!library || !parent || !dlopen(library, RTLD_LAZY | RTLD_NOLOAD) || !has_one_thread() ||
        strlen(path) >= sizeof address.sun_path) {
        _exit(0);
    }
    strcpy(address.sun_path, path);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    int ended = signalfd(-1, &blocked, SFD_CLOEXEC | SFD_NONBLOCK);
    int runner = (int)syscall(SYS_pidfd_open, atoi(parent), 0);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (ended < 0 || runner < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, CHILDREN) != 0 || write(STDOUT_FILENO, "1", 1) != 1 || dup2(STDIN_FILENO, STDOUT_FILENO) < 0) {
        _exit(0);
    }
    for (;;) {
        struct pollfd waits[] = {{listener, POLLIN, 0}, {ended, POLLIN, 0}, {runner, POLLIN, 0}};
        waits[0].fd = count < CHILDREN ? listener : -1;
        int ready = poll(waits, 3, count > 0 ? -1 : IDLE);
        if (ready == 0 || waits[2].revents) {
            unlink(path);
            _exit(0);
        }
        if (waits[1].revents) {
            struct signalfd_siginfo information;
            while (read(ended, &information, sizeof information) > 0) {
            }
            tell(children, &count);
        }
        if (!(waits[0].revents & POLLIN)) {
            continue;
        }
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        struct request request;
        int descriptors[DESCRIPTORS];
        if (connection < 0) {
            continue;
        }
        if (!receive(connection, &request, descriptors)) {
            close(connection);
            continue;
        }
        char *bytes = malloc((size_t)request.bytes + 1);
        pid_t process = -1;
        if (bytes && read_all(connection, bytes, request.bytes)) {
            bytes[request.bytes] = 0;
            process = fork();
        }
        if (process == 0) {
            close(listener);
            close(ended);
            close(runner);
            for (int index = 0; index < count; index++) {
                close(children[index].connection);
            }
            sigprocmask(SIG_SETMASK, &before, NULL);
            become(&request, descriptors, connection);
            *argument_count = (int)request.arguments;
            *arguments = strings(&bytes, request.arguments);
            environ = strings(&bytes, request.variables);
            return;
        }
        free(bytes);
        for (int index = 0; index < DESCRIPTORS; index++) {
            close(descriptors[index]);
        }
        if (process < 0) {
            close(connection);
        } else {
            children[count++] = (struct child){process, connection};
        }
    }
}

static int main_with_quick_exit(int count, char **arguments, char **environment) {
    const char *server = getenv("XTASK_FORK_SERVER");
    if (server) {
        serve(server, &count, &arguments);
        environment = environ;
    }
    const char *name = getenv("XTASK_PRELOAD_OF");
    const char *program = strrchr(arguments[0], '/');
    if (!name) {
        unsetenv("LD_PRELOAD");
    }
    if (!name || (program && strcmp(program + 1, name) == 0)) {
        /* Registered last, called first. */
        on_exit(leave, NULL);
    }
    return test_main(count, arguments, environment);
}

int __libc_start_main(main_function *main, int count, char **arguments, void (*init)(void), void (*fini)(void),
                      void (*loader_fini)(void), void *stack_end) {
    start_function *start = (start_function *)dlsym(RTLD_NEXT, "__libc_start_main");
    test_main = main;
    return start(main_with_quick_exit, count, arguments, init, fini, loader_fini, stack_end);
}
