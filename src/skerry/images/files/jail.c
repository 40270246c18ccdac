/* Starts one program in a jail and tells its pid. See docs/adr/0008-jail.md.

     jail [-c CGROUP.PROCS]... [-u UID] [-g GID]... [-r PATH]... [-R PATH]... [-w PATH]... [-v DEVICE]...
          -p DESCRIPTOR -d DIRECTORY -- PROGRAM [ARGUMENT]...

   The program is the first process of a PID namespace of its own, in mount, IPC, UTS and cgroup namespaces of its own; the
   network namespace is the caller's. It sees nothing but what was named, each at the path it has outside:

     -r  a file, or a directory with what is in it and not what is mounted there: read-only, nothing to be executed
     -R  a directory with all that is below it, or a file: read-only
     -w  a file or directory, which is made the program's own: readable and writable
     -v  a device, as it is
     -d  its working directory, in which nothing is but what was named
     -p  where the pid is written to, as it is outside; the program does not get this descriptor

   A symbolic link below -r or -R is shown as a link. It runs as user and group 0x70000000 + its pid outside (-u: as that
   user instead), in the groups named by -g, with no capability and no way to get one, and is what the kernel kills first
   when memory runs out. It inherits the caller's descriptors. The caller is its parent,
   also where it failed (exit 70, with a line that says at what): it has ended then, and is to be waited for.

   Needs no C library and no header, so that one compiler of 200 KB makes it. x86-64, Linux 5.12 and later. */

typedef unsigned long size;

enum {
    WRITE = 1, OPEN = 2, CLOSE = 3, EXECVE = 59, EXIT = 60, CHDIR = 80, MKDIR = 83, SYMLINK = 88, READLINK = 89, UMASK = 95,
    SETSID = 112, SETGROUPS = 116, SETRESUID = 117, SETRESGID = 119, CAPSET = 126, PIVOT_ROOT = 155, PRCTL = 157,
    SETRLIMIT = 160, MOUNT = 165, UMOUNT2 = 166, FCHOWNAT = 260, NEWFSTATAT = 262, OPEN_TREE = 428, MOVE_MOUNT = 429,
    MOUNT_SETATTR = 442,
};
enum { EEXIST = 17, EINVAL = 22 };
enum { O_WRONLY = 1, O_CREAT = 0100, AT_FDCWD = -100, AT_SYMLINK_NOFOLLOW = 0x100, AT_EMPTY_PATH = 0x1000 };
enum { AT_RECURSIVE = 0x8000, CLONE_TREE = 1, TREE_CLOEXEC = 02000000, FROM_EMPTY_PATH = 4 };
enum { S_IFMT = 0170000, S_IFDIR = 0040000, S_IFLNK = 0120000 };
enum { RDONLY = 1, NOSUID = 2, NODEV = 4, NOEXEC = 8, MS_REMOUNT = 32, MS_REC = 16384, MS_PRIVATE = 1 << 18, DETACH = 2 };
enum { PR_CAPBSET_DROP = 24, PR_SET_NO_NEW_PRIVS = 38, RLIMIT_CORE = 4, CAPABILITIES = 64 };

#define CLONE_VM 0x100UL
#define CLONE_VFORK 0x4000UL
#define CLONE_PARENT 0x8000UL
#define CLONE_NEWNS 0x20000UL
#define CLONE_PARENT_SETTID 0x100000UL
#define CLONE_NEWCGROUP 0x2000000UL
#define CLONE_NEWUTS 0x4000000UL
#define CLONE_NEWIPC 0x8000000UL
#define CLONE_NEWPID 0x20000000UL
#define FIRST_UID 0x70000000L
#define PATH_MAX 4096
#define NAMED_MAX 1000
#define GROUPS_MAX 8
#define ROOT "/proc"  /* where the new root is put together: a directory that every machine has */
#define FAILED 70

struct clone_args { size flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup; };
struct stat { size dev, ino, links; unsigned mode, uid, gid, pad; size rest[14]; };
struct mount_attr { size set, clear, propagation, userns; };
struct rlimit { size now, most; };

struct named { char kind, *path; int tree, mode; };

/* All of it static: the child runs in the parent's memory until it becomes the program. */
static struct named named[NAMED_MAX];
static int named_count, group_count, child_pid;
static unsigned groups[GROUPS_MAX];
static char *cgroups[GROUPS_MAX], *directory, **program, **environment;
static int cgroup_count;
static long uid = -1, report = -1;
static const char *failed_at;  /* what the child could not do, with what and why; null: it is the program now */
static const char *failed_with;
static long failed_errno;

long call(long number, ...);
long clone3(struct clone_args *args, long length);

/* clone3: see guest/birth.c. _start: where a process begins, with its arguments on the stack. */
__asm__(
    ".globl _start\n"
    "_start:\n"
    " mov %rsp,%rdi\n and $-16,%rsp\n call begin\n"
    "call:\n"
    " mov %rdi,%rax\n mov %rsi,%rdi\n mov %rdx,%rsi\n mov %rcx,%rdx\n mov %r8,%r10\n mov %r9,%r8\n"
    " mov 8(%rsp),%r9\n"
    " syscall\n ret\n"
    "clone3:\n"
    " pop %rdx\n mov $435,%eax\n syscall\n push %rdx\n ret\n");

static void end(long code)
{
    for (;;)
        call(EXIT, code);
}

static size length(const char *text)
{
    size n = 0;
    while (text[n])
        n++;
    return n;
}

static void say(long fd, const char *text)
{
    call(WRITE, fd, text, length(text));
}

static void say_number(long fd, long number)
{
    char digits[24], *at = digits + 23;
    *at = 0;
    do
        *--at = '0' + number % 10;
    while (number /= 10);
    say(fd, at);
}

static void refuse(const char *what, const char *with)
{
    say(2, "jail: ");
    say(2, what);
    say(2, " ");
    say(2, with);
    say(2, "\n");
    end(64);
}

/* In the child: give up. The parent tells. */
static void fail(const char *what, const char *with, long result)
{
    failed_errno = -result;
    failed_with = with;
    failed_at = what;
    end(FAILED);
}

static long must(const char *what, const char *with, long result)
{
    if (result < 0)
        fail(what, with, result);
    return result;
}

static long number_of(const char *text)
{
    long value = 0;
    const char *at = text;
    if (!*at)
        refuse("not a number:", text);
    for (; *at; at++) {
        if (*at < '0' || *at > '9' || value > 0xffffffffL)
            refuse("not a number:", text);
        value = value * 10 + (*at - '0');
    }
    return value;
}

static void put(const char *file, const char *text)
{
    long fd = must("open", file, call(OPEN, file, (long)O_WRONLY));
    must("write", file, call(WRITE, fd, text, length(text)));
    call(CLOSE, fd);
}

/* Take hold of what is to be seen, while it can still be found. */
static void take(struct named *it)
{
    struct stat found;
    struct mount_attr attr = {NOSUID, 0, 0, 0};
    long flags = AT_SYMLINK_NOFOLLOW | (it->kind == 'R' ? AT_RECURSIVE : 0);
    must("stat", it->path, call(NEWFSTATAT, (long)AT_FDCWD, it->path, &found, (long)AT_SYMLINK_NOFOLLOW));
    it->mode = found.mode & S_IFMT;
    if (it->mode == S_IFLNK) {
        if (it->kind != 'r' && it->kind != 'R')
            fail("a link may not be written:", it->path, -EINVAL);
        return;
    }
    it->tree = must("open_tree", it->path, call(OPEN_TREE, (long)AT_FDCWD, it->path, flags | CLONE_TREE | TREE_CLOEXEC));
    if (it->kind != 'v')
        attr.set |= NODEV;
    if (it->kind == 'r' || it->kind == 'R')
        attr.set |= RDONLY;
    if (it->kind != 'R')
        attr.set |= NOEXEC;
    flags = AT_EMPTY_PATH | (it->kind == 'R' ? AT_RECURSIVE : 0);
    must("mount_setattr", it->path, call(MOUNT_SETATTR, (long)it->tree, "", flags, &attr, sizeof attr));
    if (it->kind == 'w')
        must("chown", it->path, call(FCHOWNAT, (long)AT_FDCWD, it->path, uid, uid, (long)AT_SYMLINK_NOFOLLOW));
}

/* Make every directory on the way to a path, which is relative. */
static void make_way(char *path)
{
    char *at;
    long result;
    for (at = path; *at; at++)
        if (*at == '/' && at != path) {
            *at = 0;
            result = call(MKDIR, path, 0755L);
            if (result < 0 && result != -EEXIST)
                fail("mkdir", path, result);
            *at = '/';
        }
}

/* The path as it is below the new root, with every directory on the way made. */
static char *way_to(const char *absolute)
{
    static char path[PATH_MAX];
    size n = length(absolute);
    if (absolute[0] != '/' || !absolute[1] || n >= PATH_MAX)
        fail("not an absolute path:", absolute, -EINVAL);
    for (n = 0; (path[n] = absolute[n + 1]); n++)
        ;
    make_way(path);
    return path;
}

static void make_directory(const char *absolute)
{
    long result = call(MKDIR, way_to(absolute), 0755L);
    if (result < 0 && result != -EEXIST)
        fail("mkdir", absolute, result);
}

static void show(struct named *it)
{
    static char link[PATH_MAX];
    char *path = way_to(it->path);
    long result;
    if (it->mode == S_IFLNK) {
        result = must("readlink", it->path, call(READLINK, it->path, link, (long)PATH_MAX - 1));
        link[result] = 0;
        if ((result = call(SYMLINK, link, path)) < 0 && result != -EEXIST)
            fail("symlink", it->path, result);
        return;
    }
    if (it->mode == S_IFDIR)
        make_directory(it->path);
    else
        call(CLOSE, must("mount point", it->path, call(OPEN, path, (long)(O_WRONLY | O_CREAT), 0600L)));
    must("move_mount", it->path, call(MOVE_MOUNT, (long)it->tree, "", (long)AT_FDCWD, path, (long)FROM_EMPTY_PATH));
    call(CLOSE, (long)it->tree);
}

static void set_up_files(void)
{
    int n;
    must("mount", "/", call(MOUNT, 0L, "/", 0L, (long)(MS_REC | MS_PRIVATE), 0L));
    for (n = 0; n < named_count; n++)
        take(&named[n]);
    must("mount", ROOT, call(MOUNT, "jail", ROOT, "tmpfs", (long)(NOSUID | NODEV | NOEXEC), "size=1m,mode=0755"));
    must("chdir", ROOT, call(CHDIR, ROOT));
    for (n = 0; n < named_count; n++)
        show(&named[n]);
    make_directory(directory);
    must("pivot_root", ROOT, call(PIVOT_ROOT, ".", "."));
    must("umount", "the old root", call(UMOUNT2, ".", (long)DETACH));
    must("chdir", directory, call(CHDIR, directory));
    must("remount", "/", call(MOUNT, 0L, "/", 0L, (long)(MS_REMOUNT | RDONLY | NOSUID | NODEV | NOEXEC), 0L));
}

static void drop_rights(void)
{
    struct { unsigned version, pid; } header = {0x20080522, 0};
    unsigned none[6] = {0, 0, 0, 0, 0, 0};
    long n;
    must("prctl", "no_new_privs", call(PRCTL, (long)PR_SET_NO_NEW_PRIVS, 1L, 0L, 0L, 0L));
    for (n = 0; n < CAPABILITIES; n++)
        if (call(PRCTL, (long)PR_CAPBSET_DROP, n, 0L, 0L, 0L) < 0)
            break; /* the kernel knows no more of them */
    must("setgroups", "", call(SETGROUPS, (long)group_count, groups));
    must("setresgid", "", call(SETRESGID, uid, uid, uid));
    must("setresuid", "", call(SETRESUID, uid, uid, uid));
    must("capset", "", call(CAPSET, &header, none));
}

static void child(void)
{
    struct rlimit no_core = {0, 0};
    int n;
    if (uid < 0)
        uid = FIRST_UID + child_pid;
    call(SETSID);
    call(UMASK, 022L);
    for (n = 0; n < cgroup_count; n++)
        put(cgroups[n], "0");
    put("/proc/self/oom_score_adj", "500");
    must("setrlimit", "core", call(SETRLIMIT, (long)RLIMIT_CORE, &no_core));
    set_up_files();
    call(UMASK, 077L);
    drop_rights();
    call(CLOSE, report);
    fail("execve", program[0], call(EXECVE, program[0], program, environment));
}

static char **option(char **at)
{
    char *text = at[0], *value = at[1];
    if (text[0] != '-' || !text[1] || text[2] || !value)
        refuse("not an option with a value:", text);
    if (text[1] == 'r' || text[1] == 'R' || text[1] == 'w' || text[1] == 'v') {
        if (named_count == NAMED_MAX)
            refuse("too many files:", value);
        named[named_count].kind = text[1];
        named[named_count++].path = value;
    } else if (text[1] == 'c' || text[1] == 'g') {
        if ((text[1] == 'c' ? cgroup_count : group_count) == GROUPS_MAX)
            refuse("too many:", text);
        if (text[1] == 'c')
            cgroups[cgroup_count++] = value;
        else
            groups[group_count++] = number_of(value);
    } else if (text[1] == 'u') {
        uid = number_of(value);
    } else if (text[1] == 'p') {
        report = number_of(value);
    } else if (text[1] == 'd') {
        directory = value;
    } else {
        refuse("unknown option:", text);
    }
    return at + 2;
}

void begin(long *stack)
{
    struct clone_args how = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    long argc = stack[0], pid;
    char **at = (char **)(stack + 1);
    environment = at + argc + 1;
    if (argc)
        at++;
    while (*at && !(at[0][0] == '-' && at[0][1] == '-' && !at[0][2]))
        at = option(at);
    program = at + 1;
    if (!*at || !*program)
        refuse("no program", "");
    if (!directory || report < 0)
        refuse("-d and -p are needed", "");
    how.flags = CLONE_VM | CLONE_VFORK | CLONE_PARENT | CLONE_PARENT_SETTID | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC |
                CLONE_NEWUTS | CLONE_NEWCGROUP;
    how.parent_tid = (size)&child_pid;
    pid = clone3(&how, sizeof how);
    if (pid == 0)
        child();
    if (pid < 0) {
        failed_at = "clone3";
        failed_with = "";
        failed_errno = -pid;
    }
    if (pid > 0) {
        say_number(report, pid);
        say(report, "\n");
    }
    if (failed_at) {
        say(2, "jail: ");
        say(2, failed_at);
        say(2, " ");
        say(2, failed_with);
        say(2, ": error ");
        say_number(2, failed_errno);
        say(2, "\n");
        end(FAILED);
    }
    end(0);
}
