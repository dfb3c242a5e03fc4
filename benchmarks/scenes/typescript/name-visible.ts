interface Task {
  title: string;
  done: boolean;
  due: Date;
}

export function overdueTitles(tasks: Task[], now: Date): string[] {
  const unfinishedTasks = tasks.filter((task) => !task.done);
  const overdueTasks = unfinishedTasks.filter((task) => task.due < now);
  return over▏dueTasks.map((task) => task.title);▕
}
