/* Starts one program and, for a moment, waits for its end: what `birth.py` cannot say in Python.

   The child is made by clone3 with CLONE_VFORK and CLONE_VM: nothing of the agent is copied, and the child says what
   failed in the agent's own memory. It is born in its cgroup, takes the user's ids itself, and only then enters the
   directory, opens the terminal and executes: the kernel judges all three as the user. The agent's memory is not
   dumpable (linux.hide_memory), so no process of that user can trace the child while it shares it.

   Needs no C library and no header, so that one compiler of 200 KB makes it and any loader loads it. x86-64. */

typedef unsigned long size;

struct job { /* `birth.JOB` has the same members in the same order, each a long */
    /* in */
    long candidates, argc, envc; /* how many strings of each follow the directory (and the terminal) in the texts */
    long uid, gid, groups;       /* groups: how many; -1: the agent's own ids and groups are the user's */
    long cgroup;                 /* a descriptor, or -1 */
    long terminal;               /* 1: the texts name one, and it becomes 0, 1 and 2 */
    long in, out, err;           /* become 0, 1 and 2 */
    long hold_ms;                /* how long to wait for its end; 0: not at all */
    long reader;                 /* the host's connection: its end ends the waiting */
    /* in and out: the pipes' reading ends, -1 once they are at their end and closed */
    long from_out, from_err;
    /* out */
    long pid, pidfd;
    long stage, error;           /* where it failed, and the error number; 0, 0: it runs */
    long ended, status;          /* ended: out and err are closed, and status is what wait gave */
    long out_bytes, err_bytes;   /* in the first and in the second half of the buffer */
};

enum { STAGE_CLONE = 1, STAGE_USER, STAGE_DIRECTORY, STAGE_TERMINAL, STAGE_PROGRAM, STAGE_INTERPRETER };

enum {
    READ = 0, OPEN = 2, CLOSE = 3, POLL = 7, SIGACTION = 13, SIGPROCMASK = 14, IOCTL = 16, DUP2 = 33, EXECVE = 59,
    EXIT = 60, WAIT4 = 61, CHDIR = 80, UMASK = 95, SETSID = 112, SETGROUPS = 116, SETRESUID = 117, SETRESGID = 119,
    CLOCK_GETTIME = 228, FACCESSAT = 269,
};
enum { ENOENT = 2, EINTR = 4, EACCES = 13, ENOTDIR = 20, ENAMETOOLONG = 36, ELOOP = 40 };
enum { POLLIN = 1, POLLHUP = 16, POLLRDHUP = 0x2000, FIONREAD = 0x541B, CLOCK_MONOTONIC = 1, O_RDWR = 2 };

struct clone_args { size flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup; };
struct action { void *handler; size flags; void *restorer; size mask; };
struct pollfd { int fd; short events, revents; };
struct timespec { long s, ns; };

#define CLONE_VM 0x100UL
#define CLONE_PIDFD 0x1000UL
#define CLONE_VFORK 0x4000UL
#define CLONE_CLEAR_SIGHAND 0x100000000UL
#define CLONE_INTO_CGROUP 0x200000000UL
#define SIGCHLD 17

long call(long number, ...);
long clone3(struct clone_args *args, long length);

/* clone3: the child runs on this very stack while its parent stands still, and would overwrite the return address that
   the parent needs; so that waits in a register. */
__asm__(
    "call:\n"
    " mov %rdi,%rax\n mov %rsi,%rdi\n mov %rdx,%rsi\n mov %rcx,%rdx\n mov %r8,%r10\n mov %r9,%r8\n"
    " syscall\n ret\n"
    "clone3:\n"
    " pop %rdx\n mov $435,%eax\n syscall\n push %rdx\n ret\n");

static size ignored; /* the signals that the agent ignores: execve would hand that on */

/* Once, before the first `spawn`. */
void prepare(void)
{
    long number;
    struct action found;
    for (number = 1; number <= 64; number++)
        if (call(SIGACTION, number, 0L, &found, 8L) == 0 && found.handler == (void *)1)
            ignored |= 1UL << (number - 1);
}

static void fail(struct job *job, long stage, long result)
{
    job->error = -result;
    job->stage = stage;
    for (;;)
        call(EXIT, 127L);
}

static void execute(struct job *job, char *candidate, char **argv, char **env)
{
    long n, result, refused = 0, last = -ENOENT;
    for (n = 0; n < job->candidates; n++) {
        result = call(EXECVE, candidate, argv, env);
        if (result == -ENOENT && call(FACCESSAT, -100L, candidate, 0L) == 0)
            fail(job, STAGE_INTERPRETER, result);
        if (result == -EACCES)
            refused = result;
        else if (result != -ENOENT && result != -ENOTDIR && result != -ELOOP && result != -ENAMETOOLONG)
            fail(job, STAGE_PROGRAM, result);
        last = result;
        while (*candidate++)
            ;
    }
    fail(job, STAGE_PROGRAM, refused ? refused : last);
}

static void child(struct job *job, char *directory, unsigned *groups, char **argv, char **env)
{
    long result, number;
    size none = 0;
    struct action usual;
    char *next = directory;
    while (*next++)
        ;
    call(SETSID);
    if (job->groups >= 0) {
        if ((result = call(SETGROUPS, job->groups, groups)) < 0)
            fail(job, STAGE_USER, result);
        if ((result = call(SETRESGID, job->gid, job->gid, job->gid)) < 0)
            fail(job, STAGE_USER, result);
        if ((result = call(SETRESUID, job->uid, job->uid, job->uid)) < 0)
            fail(job, STAGE_USER, result);
    }
    call(UMASK, 022L);
    if ((result = call(CHDIR, directory)) < 0)
        fail(job, STAGE_DIRECTORY, result);
    if (job->terminal) { /* the first one that a session's leader opens becomes its controlling one */
        result = call(OPEN, next, (long)O_RDWR, 0L);
        if (result < 0)
            fail(job, STAGE_TERMINAL, result);
        for (number = 0; number < 3; number++)
            call(DUP2, result, number);
        if (result > 2)
            call(CLOSE, result);
        while (*next++)
            ;
    } else {
        call(DUP2, job->in, 0L);
        call(DUP2, job->out, 1L);
        call(DUP2, job->err, 2L);
    }
    usual.handler = 0;
    usual.flags = 0;
    usual.restorer = 0;
    usual.mask = 0;
    for (number = 1; number <= 64; number++)
        if (ignored & (1UL << (number - 1)))
            call(SIGACTION, number, &usual, 0L, 8L);
    call(SIGPROCMASK, 2L, &none, 0L, 8L);
    execute(job, next, argv, env);
}

static long now_ms(void)
{
    struct timespec at;
    call(CLOCK_GETTIME, (long)CLOCK_MONOTONIC, &at);
    return at.s * 1000 + at.ns / 1000000;
}

/* What is in a pipe now, as far as there is room. 0: there may be more. */
static int take(long fd, char *buffer, long *filled, long room)
{
    int there = 0;
    long want, got;
    call(IOCTL, fd, (long)FIONREAD, &there);
    want = there < room - *filled ? there : room - *filled;
    while (want > 0) {
        got = call(READ, fd, buffer + *filled, want);
        if (got <= 0)
            return 0;
        *filled += got;
        want -= got;
    }
    return *filled < room;
}

/* The program is over: what it left in the pipes, and their ends where no child of its holds them. */
static void collect(struct job *job, char *buffer, long room)
{
    struct pollfd ends[2];
    long *fds[2], *filled[2];
    int n, full;
    fds[0] = &job->from_out;
    fds[1] = &job->from_err;
    filled[0] = &job->out_bytes;
    filled[1] = &job->err_bytes;
    call(CLOSE, job->out);
    call(CLOSE, job->err);
    for (n = 0; n < 2; n++) {
        ends[n].fd = *fds[n];
        ends[n].events = POLLIN;
        ends[n].revents = 0;
    }
    call(POLL, ends, 2L, 0L);
    for (n = 0; n < 2; n++) {
        full = (ends[n].revents & POLLIN) && !take(*fds[n], buffer + n * room, filled[n], room);
        if ((ends[n].revents & POLLHUP) && !full) {
            call(CLOSE, *fds[n]);
            *fds[n] = -1;
        }
    }
}

static void wait(struct job *job, char *buffer, long room)
{
    struct pollfd on[4];
    long left, end = now_ms() + job->hold_ms, result;
    int status = 0;
    on[0].fd = job->pidfd;
    on[1].fd = job->from_out;
    on[2].fd = job->from_err;
    on[3].fd = job->reader;
    on[0].events = on[1].events = on[2].events = POLLIN;
    on[3].events = POLLIN | POLLRDHUP;
    for (;;) {
        left = end - now_ms();
        if (left <= 0)
            return;
        result = call(POLL, on, 4L, left);
        if (result == -EINTR)
            continue;
        if (result <= 0)
            return;
        if (on[0].revents) {
            if (call(WAIT4, job->pid, &status, 0L, 0L) != job->pid)
                return;
            job->status = status;
            job->ended = 1;
            collect(job, buffer, room);
            return;
        }
        if (on[3].revents)
            return;
        if (on[1].revents && !take(job->from_out, buffer, &job->out_bytes, room))
            return;
        if (on[2].revents && !take(job->from_err, buffer + room, &job->err_bytes, room))
            return;
    }
}

/* texts: directory, terminal (if there is one), candidates, argv, env, each ended by a zero byte.
   table: room for argc + envc + 2 pointers. buffer: two halves of `room` bytes. */
void spawn(struct job *job, char *texts, char **table, unsigned *groups, char *buffer, long room)
{
    struct clone_args how;
    size all = ~0UL, before;
    int pidfd = -1;
    long n, pid, skip = 1 + job->terminal + job->candidates;
    char *at = texts, **env = table + job->argc + 1;
    for (n = 0; n < skip; n++)
        while (*at++)
            ;
    for (n = 0; n < job->argc; n++) {
        table[n] = at;
        while (*at++)
            ;
    }
    table[job->argc] = 0;
    for (n = 0; n < job->envc; n++) {
        env[n] = at;
        while (*at++)
            ;
    }
    env[job->envc] = 0;

    job->stage = job->error = job->ended = job->status = job->out_bytes = job->err_bytes = 0;
    how.flags = CLONE_VM | CLONE_VFORK | CLONE_PIDFD | CLONE_CLEAR_SIGHAND;
    how.pidfd = (size)&pidfd;
    how.child_tid = how.parent_tid = how.stack = how.stack_size = how.tls = how.set_tid = how.set_tid_size = 0;
    how.exit_signal = SIGCHLD;
    how.cgroup = 0;
    if (job->cgroup >= 0) {
        how.flags |= CLONE_INTO_CGROUP;
        how.cgroup = job->cgroup;
    }
    call(SIGPROCMASK, 2L, &all, &before, 8L);
    pid = clone3(&how, sizeof how);
    if (pid == 0)
        child(job, texts, groups, table, env);
    call(SIGPROCMASK, 2L, &before, 0L, 8L);
    if (pid < 0) {
        job->stage = STAGE_CLONE;
        job->error = -pid;
        return;
    }
    job->pid = pid;
    job->pidfd = pidfd;
    if (job->stage) {
        while (call(WAIT4, pid, 0L, 0L, 0L) == -EINTR)
            ;
        call(CLOSE, job->pidfd);
        return;
    }
    if (job->hold_ms > 0)
        wait(job, buffer, room);
}
