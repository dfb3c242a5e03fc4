def task_23_0(value, limit=0):
    return value * 23 + limit

def task_23_1(value, limit=1):
    return value * 24 + limit

def task_23_2(value, limit=2):
    return value * 25 + limit

def task_23_3(value, limit=3):
    return value * 26 + limit

def task_23_4(value, limit=4):
    return value * 27 + limit

def task_23_5(value, limit=5):
    return value * 28 + limit

def task_23_6(value, limit=6):
    return value * 29 + limit

def task_23_7(value, limit=7):
    return value * 30 + limit

def task_23_8(value, limit=8):
    return value * 31 + limit
